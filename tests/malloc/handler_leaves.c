/* A signal handler forks while its thread holds the lock of the connection and will not ask for anything any more: as
 * the answer has just been taken, and where nothing is asked at all. The child joins its family as the interrupted
 * call ends, without a request of its own: it has a helper. Two functions of libc that the library calls at these
 * moments are this program's. */
#include "check.h"
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define BYTES ((size_t)16 << 20)
#define BLOCK ((size_t)160 << 20)

/* A request gives its signals back twice: when it is sent, and when its answer is there. */
enum { SENT = 1, TAKEN = 2 };

static int (*next_sigmask)(int, const sigset_t *, sigset_t *);
static int (*next_munlock)(const void *, size_t);
static int masks_left, munlocks_left;
static pid_t child = -1;
static int forks;

static void on_signal(int number) {
    (void)number;
    int before = errno;
    forks++;
    child = fork();
    if (child < 0)
        _exit(3);
    if (child == 0)
        alarm(30);
    errno = before;
}

int pthread_sigmask(int how, const sigset_t *set, sigset_t *before) {
    /* All signals are blocked: it comes as they are given back. */
    if (how == SIG_SETMASK && masks_left > 0 && --masks_left == 0)
        CHECK(raise(SIGUSR1) == 0);
    return next_sigmask(how, set, before);
}

int munlock(const void *start, size_t bytes) {
    if (munlocks_left > 0 && --munlocks_left == 0)
        CHECK(raise(SIGUSR1) == 0);
    return next_munlock(start, bytes);
}

static void look(const void *kept, const char *what) {
    if (forks != 1)
        FAIL("%s: %d forks", what, forks);
    if (child == 0) {
        if (own_children() != 1)
            FAIL("%s: a child has %d helpers", what, own_children());
        verify(kept, BYTES, 5, what);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("%s: a child ended with status %#x", what, status);
    verify(kept, BYTES, 5, what);
    forks = 0;
}

int main(void) {
    next_sigmask = dlsym(RTLD_NEXT, "pthread_sigmask");
    next_munlock = dlsym(RTLD_NEXT, "munlock");
    CHECK(next_sigmask && next_munlock);
    CHECK(signal(SIGUSR1, on_signal) != SIG_ERR);
    unsigned char *kept = need(BYTES), *memory = need(BYTES);
    fill(kept, BYTES, 5);
    CHECK(own_children() == 1);

    for (int when = SENT; when <= TAKEN; when++) {
        fill(memory, BYTES, 3);
        masks_left = when;
        int outcome = madvise(memory, BYTES, MADV_DONTNEED);
        CHECK(outcome == 0);
        verify_zero(memory, BYTES, "madvise");
        look(kept, when == SENT ? "madvise, sent" : "madvise, taken");

        unsigned char *block = need(BLOCK);
        fill(block, BLOCK, 9);
        verify(block, BYTES, 9, "a block");
        masks_left = when;
        free(block);
        look(kept, when == SENT ? "free, sent" : "free, taken");
    }

    munlocks_left = 1;
    CHECK(mlockall(MCL_CURRENT | MCL_ONFAULT) == 0);
    look(kept, "mlockall");
    CHECK(munlockall() == 0);
    printf("ok handler_leaves\n");
    return 0;
}
