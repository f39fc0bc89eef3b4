/* Forks in a signal handler that has interrupted fork() in its middle. The process that the handler makes ends
 * there, or returns from the handler and goes on with the interrupted fork as its maker does. All of them have
 * their bytes, and afterwards other threads can fork. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#define PAGE ((size_t)4096)

/* Of the library: what is called in the middle of each fork. */
enum { PREPARE, PARENT, CHILD, NEVER };
extern void (*fork_hook)(int when);

static uint64_t *memory;
static int interrupt_at = NEVER;
static bool returns;
static int interrupted;

static void await(pid_t child, const char *what) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("%s ended with status %#x", what, status);
}

static void hook(int when) {
    if (when != interrupt_at)
        return;
    interrupt_at = NEVER;
    CHECK(raise(SIGUSR1) == 0);
}

static void on_signal(int number) {
    (void)number;
    interrupted++;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child != 0) {
        await(child, "a child of the handler");
    } else if (!returns) {
        verify(memory, working_set(), 1, "a child of the handler");
        _exit(0);
    }
}

/* Writes to every third page, and to a new block. */
static void live(uint64_t own, const char *who) {
    verify(memory, working_set(), 1, who);
    for (size_t page = own; page < working_set() / PAGE; page += 3)
        fill(memory + page * PAGE / 8, PAGE, own);
    size_t bytes = 8 << 20;
    void *block = need(bytes);
    fill(block, bytes, own);
    for (size_t page = own; page < working_set() / PAGE; page += 3)
        verify(memory + page * PAGE / 8, PAGE, own, who);
    verify(block, bytes, own, who);
    free(block);
}

static void *other_thread(void *unused) {
    (void)unused;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        live(2, "a child of another thread");
        _exit(0);
    }
    await(child, "a child of another thread");
    return NULL;
}

static void fork_elsewhere(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    struct timespec until;
    CHECK(clock_gettime(CLOCK_REALTIME, &until) == 0);
    until.tv_sec += 30;
    errno = pthread_timedjoin_np(thread, NULL, &until);
    CHECK(errno == 0);
}

int main(void) {
    memory = need(working_set());
    fill(memory, working_set(), 1);
    CHECK(signal(SIGUSR1, on_signal) != SIG_ERR);
    fork_hook = hook;
    pid_t origin = getpid();
    for (int when = PREPARE; when < NEVER; when++)
        for (int turn = 0; turn < 2; turn++) {
            returns = turn == 1;
            interrupt_at = when;
            interrupted = 0;
            pid_t child = fork();
            CHECK(child >= 0);
            /* What the prepare or the parent's half was interrupted for is seen by all. */
            CHECK(when == PARENT || child == 0 || interrupted == (when == PREPARE));
            if (child == 0) {
                CHECK(interrupted == (when != PARENT));
                if (own_children() != 1)
                    FAIL("%d: a child has %d helpers", when, own_children());
                live(2, "a child");
                _exit(0);
            }
            if (when == PARENT && getpid() != origin)
                /* Its maker's child, and none of its own. */
                _exit(0);
            await(child, "a child");
            verify(memory, working_set(), 1, "a parent");
            if (getpid() != origin)
                _exit(0);
            fork_elsewhere();
            verify(memory, working_set(), 1, "the parent");
        }
    printf("ok fork_inside: %zu bytes\n", working_set());
    return 0;
}
