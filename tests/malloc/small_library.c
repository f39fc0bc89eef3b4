/* Loaded before the program begins: its handlers around fork run inside those of the allocator, and its
 * block is older than the allocator. The program frees it. */
#include "check.h"
#include "atfork_inside.h"

void *small_library_block;

static void allocate_some(void) {
    void *kept[200];
    for (size_t i = 0; i < 200; i++)
        kept[i] = need(16 + i * 16);
    for (size_t i = 0; i < 200; i++)
        free(kept[i]);
}

__attribute__((constructor)) static void begin(void) {
    small_library_block = need(100);
    fill(small_library_block, 96, 3);
    atfork_inside(allocate_some, allocate_some, allocate_some);
}
