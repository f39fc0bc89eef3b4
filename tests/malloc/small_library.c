/* Loaded before the program begins: its handlers around fork run inside those of the allocator, and its
 * block is older than the allocator. The program frees it. */
#include "check.h"
#include "atfork_inside.h"
#include "of_allocator.h"

void *small_library_block;
static FILE *nowhere;

/* What an allocator is asked is answered, or not, but nobody hangs. */
static void ask(void) {
    malloc_trim(0);
    mallinfo();
    CHECK(mallinfo2().arena > 0);
    CHECK(malloc_info(0, nowhere) == 0);
    size_t mib[4] = {0}, length = 4, value, bytes = sizeof value;
    if (mallctl && mallctlnametomib && mallctlbymib) {
        mallctl("stats.allocated", &value, &bytes, NULL, 0);
        if (mallctlnametomib("stats.mapped", mib, &length) == 0)
            mallctlbymib(mib, length, &value, &bytes, NULL, 0);
    }
}

static void allocate_some(void) {
    void *kept[200];
    for (size_t i = 0; i < 200; i++)
        kept[i] = need(16 + i * 16);
    for (size_t i = 0; i < 200; i++)
        free(kept[i]);
    ask();
}

__attribute__((constructor)) static void begin(void) {
    nowhere = fopen("/dev/null", "w");
    CHECK(nowhere);
    small_library_block = need(100);
    fill(small_library_block, 96, 3);
    atfork_inside(allocate_some, allocate_some, allocate_some);
}
