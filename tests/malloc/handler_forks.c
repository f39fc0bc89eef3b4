/* A signal handler forks while its thread waits for the daemon, in madvise and in free. Parent and child both go on
 * from there: neither hangs, each that is told of success reads zeros, and what the child got in the handler is its
 * own. RAW=1: by a system call of which the library hears nothing; such a child is refused. One thread, since the
 * handler allocates. */
#include "check.h"
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

#define BYTES ((size_t)16 << 20)
#define TAKEN ((size_t)4 << 20)
#define FORKS 40

static volatile sig_atomic_t inside, is_child, forks_left = FORKS;
static bool is_raw;
static unsigned char *taken;
static pid_t children[FORKS];
static int count;

static void on_alarm(int number) {
    (void)number;
    int before = errno;
    if (inside && !is_child && forks_left > 0) {
        forks_left--;
        pid_t child = is_raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
        if (child < 0)
            _exit(3);
        if (child == 0) {
            is_child = 1;
            alarm(60);
            taken = malloc(TAKEN);
            if (taken)
                fill(taken, TAKEN, 7);
        } else {
            children[count++] = child;
        }
    }
    errno = before;
}

/* A signal some time from now, perhaps while we are inside of what follows. */
static void call_soon(void) {
    struct itimerval soon = {{0, 0}, {0, 1 + rand() % 400}};
    if (!is_child)
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
}

static void end_child(const void *kept) {
    if (taken)
        verify(taken, TAKEN, 7, "what a child got in the handler");
    verify(kept, BYTES, 5, "what a child had");
    _exit(0);
}

static void drop(unsigned char *memory) {
    fill(memory, BYTES, 3);
    call_soon();
    inside = 1;
    int outcome = madvise(memory, BYTES, MADV_DONTNEED);
    inside = 0;
    if (outcome == 0)
        verify_zero(memory, BYTES, is_child ? "a child" : "the parent");
    else if (!is_child || !is_raw)
        FAIL("madvise: %s", strerror(errno));
}

int main(void) {
    is_raw = getenv("RAW") != NULL;
    CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    unsigned char *kept = need(BYTES), *memory = need(BYTES);
    fill(kept, BYTES, 5);
    uint64_t end = now_ns() + 60 * 1000000000ull;
    for (int round = 0; forks_left > 0 && now_ns() < end; round++) {
        if (round % 2 == 0) {
            drop(memory);
        } else {
            unsigned char *block = need(4 * BYTES);
            memset(block, 9, 4 * BYTES);
            call_soon();
            inside = 1;
            free(block);
            inside = 0;
        }
        if (is_child) {
            if (!is_raw)
                drop(memory);
            end_child(kept);
        }
    }
    struct itimerval none = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &none, NULL) == 0);
    for (int i = 0; i < count; i++) {
        int status;
        CHECK(waitpid(children[i], &status, 0) == children[i]);
        if (status != 0)
            FAIL("child %d ended with status %#x", i, status);
    }
    verify(kept, BYTES, 5, "the parent at the end");
    if (count < FORKS / 2)
        FAIL("only %d forks", count);
    printf("ok handler_forks: %d\n", count);
    return 0;
}
