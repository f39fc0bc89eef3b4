/* Signal handlers that allocate and free, which POSIX does not allow and programs do: where they interrupt the
 * allocator itself they neither hang nor spoil it. One thread: the C library has no lock then either. */
#include "check.h"
#include <malloc.h>
#include <signal.h>
#include <time.h>

#define LARGE (1 << 20)

static volatile sig_atomic_t handled;
static unsigned char *kept;

static void on_alarm(int number) {
    (void)number;
    int before = errno;
    handled++;
    unsigned char *block = malloc(LARGE + handled % 5 * 4096);
    if (!block)
        _exit(3);
    block[0] = block[LARGE - 1] = (unsigned char)handled;
    /* One that was made elsewhere, too, and one that grows. */
    free(kept);
    kept = realloc(block, 2 * LARGE);
    if (!kept)
        kept = block;
    if (kept[LARGE - 1] != (unsigned char)handled)
        _exit(4);
    errno = before;
}

int main(void) {
    /* In the C library such blocks are mappings, which take none of its lists: it passes, too. */
    CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    /* Warm: the first large block connects. */
    free(need(LARGE));
    struct itimerspec often = {{0, 100 * 1000}, {0, 100 * 1000}};
    CHECK(timer_settime(timer, 0, &often, NULL) == 0);
    unsigned char *blocks[16] = {0};
    uint64_t end = now_ns() + 5 * 1000000000ull;
    for (uint64_t i = 0; now_ns() < end; i++) {
        unsigned char **slot = &blocks[i * 7 % 16];
        if (*slot && ((*slot)[0] != (unsigned char)(i * 7 % 16) || (*slot)[LARGE - 1] != 77))
            FAIL("block %zu was spoilt", (size_t)(i * 7 % 16));
        if (i % 3) {
            free(*slot);
            *slot = need(LARGE + i % 9 * 8192);
        } else if (*slot) {
            *slot = realloc(*slot, LARGE + i % 7 * 65536);
            CHECK(*slot);
        } else {
            continue;
        }
        (*slot)[0] = (unsigned char)(i * 7 % 16);
        (*slot)[LARGE - 1] = 77;
    }
    CHECK(timer_delete(timer) == 0);
    if (handled < 1000)
        FAIL("only %d signals", (int)handled);
    printf("ok handlers: %d signals\n", (int)handled);
    return 0;
}
