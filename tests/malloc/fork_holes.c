/* A child does not get what is under MADV_DONTFORK: nothing of its own may come to lie there, since that is a part
 * of a block, which is freed and given out again. WHAT names what is there:
 *   managed   memory of the block
 *   shared    memory that the program has mapped over a part of the block; only some of it is not forked */
#include "check.h"
#include <sys/mman.h>
#include <sys/wait.h>

#define HUGE ((size_t)2 << 20)

/* Bytes of a range that have no access, and those of others. */
static void look(const unsigned char *start, size_t bytes, size_t *closed, size_t *others) {
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    char line[512], access[5];
    uintptr_t first, end, low = (uintptr_t)start, high = low + bytes;
    *closed = *others = 0;
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &first, &end, access) == 3 && first < high && end > low) {
            size_t inside = (end < high ? end : high) - (first > low ? first : low);
            *(strcmp(access, "---p") == 0 ? closed : others) += inside;
        }
    fclose(maps);
}

int main(void) {
    const char *what = getenv("WHAT");
    CHECK(what);
    size_t part = 48 << 20, bytes = part + 8 * HUGE, kept = 0;
    unsigned char *block = need(bytes);
    fill(block, bytes, 1);
    unsigned char *hole = (unsigned char *)(((uintptr_t)block + 2 * HUGE) & ~(HUGE - 1));
    size_t before = (size_t)(hole - block);
    if (strcmp(what, "shared") == 0) {
        void *at = mmap(hole, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(at == hole);
        fill(hole, part, 2);
        /* An odd number of pages at both ends is forked. */
        kept = 13 * 4096;
    }
    CHECK(madvise(hole + kept, part - 2 * kept, MADV_DONTFORK) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        size_t closed, others, native = part - 2 * kept;
        look(hole + kept, native, &closed, &others);
        if (closed != native || others != 0)
            FAIL("of %zu bytes that are not forked %zu are closed, and %zu are somebody's", native, closed, others);
        void *own = mmap(NULL, native, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(own != MAP_FAILED);
        fill(own, native, 4);
        verify_part(block, 0, before, 1, "before the hole");
        verify_part(block, before + part, bytes - before - part, 1, "behind the hole");
        if (kept) {
            verify(hole, kept, 2, "what is shared before the hole");
            verify_part(hole, part - kept, kept, 2, "what is shared behind the hole");
        }
        free(block);
        verify(own, native, 4, "a mapping of the child's own");
        size_t again_bytes = bytes / 2;
        void *again = need(again_bytes);
        fill(again, again_bytes, 5);
        push_out();
        verify(again, again_bytes, 5, "a block of the child's own");
        verify(own, native, 4, "a mapping of the child's own");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    verify_part(block, 0, before, 1, "before the part");
    if (kept)
        verify(hole, part, 2, "the part");
    else
        verify_part(block, before, part, 1, "the part");
    verify_part(block, before + part, bytes - before - part, 1, "behind the part");
    printf("ok fork_holes: %s\n", what);
    return 0;
}
