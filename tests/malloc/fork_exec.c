/* FORKS times fork and exec beside a working set of SIZE; prints what a fork costs. */
#include "check.h"
#include <sys/wait.h>

static int by_time(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(void) {
    size_t bytes = working_set(), forks = setting("FORKS", "1000");
    unsigned char *block = need(bytes);
    uint64_t *times = need(forks * sizeof *times);
    fill(block, bytes, 1);
    for (size_t i = 0; i < forks; i++) {
        uint64_t before = now_ns();
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            execl("/bin/true", "true", (char *)NULL);
            _exit(126);
        }
        times[i] = now_ns() - before;
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("child %zu ended with status %#x", i, status);
        /* The parent writes between its forks. */
        size_t page = i * 7919 % (bytes / 4096);
        verify_part(block, page * 4096, 4096, 1, "between forks");
        for (size_t word = page * 512; word < page * 512 + 512; word++)
            ((volatile uint64_t *)block)[word] = pattern(1, word);
    }
    verify(block, bytes, 1, "after all forks");
    qsort(times, forks, sizeof *times, by_time);
    printf("ok fork_exec: %zu forks, p50 %" PRIu64 " us, p99 %" PRIu64 " us\n", forks,
           times[forks / 2] / 1000, times[forks * 99 / 100] / 1000);
    return 0;
}
