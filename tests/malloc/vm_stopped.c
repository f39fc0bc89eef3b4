/* The daemon, whose processes DAEMON names, is stopped, and then killed, while a program discards parked
 * memory. A discard that succeeds gives zeros, one that fails leaves the bytes, and what is written after it
 * stays. DAEMON's first process is the keeper, which is not killed. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define BYTES ((size_t)2 << 20)

static pid_t daemon_pids[8];
static size_t daemons;

static void tell_all(int number) {
    for (size_t i = 0; i < daemons; i++)
        CHECK(kill(daemon_pids[i], number) == 0);
}

static void *go_on_later(void *unused) {
    (void)unused;
    usleep(1500000);
    tell_all(SIGCONT);
    return NULL;
}

static unsigned char *parked(uint64_t seed) {
    unsigned char *block = need(BYTES);
    fill(block, BYTES, seed);
    for (int tries = 0; tries < 20 && absent_pages(block, BYTES) < BYTES / 4096 / 2; tries++)
        push_out();
    return block;
}

/* What a discard says is what is so, now and later. */
static bool discard(unsigned char *block, int advice, uint64_t seed, const char *what) {
    bool is_done = madvise(block, BYTES, advice) == 0;
    if (!is_done)
        CHECK(errno == EAGAIN);
    if (is_done && advice == MADV_DONTNEED)
        verify_zero(block, BYTES, what);
    else if (!is_done)
        verify(block, BYTES, seed, what);
    fill(block, BYTES, seed + 1);
    usleep(100000);
    push_out();
    verify(block, BYTES, seed + 1, what);
    return is_done;
}

int main(void) {
    char *list = getenv("DAEMON");
    CHECK(list);
    for (char *pid = strtok(list, " "); pid && daemons < 8; pid = strtok(NULL, " "))
        daemon_pids[daemons++] = (pid_t)atoi(pid);
    CHECK(daemons >= 2);
    size_t successes = 0, refusals = 0;
    for (int advice = 0; advice < 2; advice++) {
        unsigned char *block = parked(1);
        pthread_t later;
        uint64_t began = now_ns();
        tell_all(SIGSTOP);
        CHECK(pthread_create(&later, NULL, go_on_later, NULL) == 0);
        if (discard(block, advice ? MADV_FREE : MADV_DONTNEED, 1, "a stopped daemon"))
            successes++;
        else
            refusals++;
        CHECK(pthread_join(later, NULL) == 0);
        CHECK(now_ns() - began < 60 * (uint64_t)1000000000);
        free(block);
    }
    unsigned char *block = parked(10);
    CHECK(kill(daemon_pids[1], SIGKILL) == 0);
    for (uint64_t round = 0; round < 10; round++) {
        if (discard(block, MADV_DONTNEED, 10 + round, "a killed daemon"))
            successes++;
        else
            refusals++;
    }
    free(block);
    pressure_end();
    printf("ok vm_stopped: %zu discards, %zu were refused\n", successes, refusals);
    return 0;
}
