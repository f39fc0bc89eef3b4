/* The daemon, whose processes DAEMON names, is gone for good, and nothing is parked. What needs it is refused
 * in time and changes nothing; the rest does what it should. */
#include "check.h"
#include <signal.h>
#include <sys/mman.h>

#define BYTES ((size_t)2 << 20)

static void refused(bool is_refused, const char *what, const void *block, size_t bytes) {
    if (!is_refused || errno != EAGAIN)
        FAIL("%s without a daemon: %s", what, is_refused ? strerror(errno) : "success");
    verify(block, bytes, 1, what);
}

int main(void) {
    char *list = getenv("DAEMON");
    unsigned char *block = aligned_alloc(4096, BYTES), *half = block + BYTES / 2;
    CHECK(list && block);
    fill(block, BYTES, 1);
    for (char *pid = strtok(list, " "); pid; pid = strtok(NULL, " "))
        CHECK(kill((pid_t)atoi(pid), SIGKILL) == 0);
    usleep(200000);
    uint64_t began = now_ns();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, access = PROT_READ | PROT_WRITE;
    for (int i = 0; i < 100; i++) {
        refused(madvise(block, BYTES, MADV_DONTNEED) != 0, "MADV_DONTNEED", block, BYTES);
        refused(mmap(block, BYTES, access, flags, -1, 0) == MAP_FAILED, "mmap", block, BYTES);
        CHECK(madvise(block, BYTES, MADV_FREE) == 0);
        CHECK(madvise(block, BYTES, MADV_WILLNEED) == 0);
        verify(block, BYTES, 1, "advice without a daemon");
        if (i == 0)
            began = now_ns();
    }
    uint64_t took = (now_ns() - began) / 1000000;
    if (took > setting("MS_MAX", "10000"))
        FAIL("99 rounds of calls took %" PRIu64 " ms", took);
    refused(mmap(block, 4096, access, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
                MAP_FAILED,
            "mmap of shared memory", block, BYTES);
    refused(madvise(block, BYTES, MADV_WIPEONFORK) != 0, "MADV_WIPEONFORK", block, BYTES);
    CHECK(mprotect(half, BYTES / 2, PROT_READ) == 0 && mprotect(half, BYTES / 2, access) == 0);
    CHECK(munmap(half, BYTES / 2) == 0);
    unsigned char *to = mremap(block, BYTES / 2, BYTES, MREMAP_MAYMOVE);
    CHECK(to != MAP_FAILED);
    verify(to, BYTES / 2, 1, "moved without a daemon");
    verify_zero(to + BYTES / 2, BYTES / 2, "moved without a daemon");
    free(block);
    block = need(BYTES);
    fill(block, BYTES, 2);
    verify(block, BYTES, 2, "the next owner without a daemon");
    free(block);
    printf("ok vm_alone: 100 rounds, %" PRIu64 " ms\n", took);
    return 0;
}
