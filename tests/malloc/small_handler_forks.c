/* A signal handler forks while its thread makes and frees small blocks. Parent and child both go on from there:
 * neither hangs, and each has its bytes. One thread: the C library has no lock then. */
#include "check.h"
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#define BLOCKS 3000
#define FORKS 150

static volatile sig_atomic_t inside, is_child, forks;
static volatile pid_t child;
static unsigned char *blocks[BLOCKS];

static size_t bytes_of(size_t index) { return 16 + index * 8 % 4000; }

static void on_alarm(int number) {
    (void)number;
    int before = errno;
    if (inside && !is_child && child == 0) {
        pid_t made = fork();
        if (made < 0)
            _exit(3);
        if (made == 0) {
            is_child = 1;
            alarm(60);
        } else {
            child = made;
            forks++;
        }
    }
    errno = before;
}

static void make_and_free(void) {
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = need(bytes_of(i));
        memset(blocks[i], (int)(i % 251), bytes_of(i));
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        if (blocks[i][0] != i % 251 || blocks[i][bytes_of(i) - 1] != i % 251)
            FAIL("a block of %s", is_child ? "a child" : "the parent");
        free(blocks[i]);
    }
}

int main(void) {
    CHECK(signal(SIGALRM, on_alarm) != SIG_ERR);
    unsigned char *kept = need(100);
    fill(kept, 96, 5);
    make_and_free();
    while (forks < FORKS) {
        struct itimerval soon = {{0, 0}, {0, 1 + rand() % 300}};
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        inside = 1;
        make_and_free();
        inside = 0;
        if (is_child) {
            CHECK(signal(SIGALRM, SIG_DFL) != SIG_ERR);
            make_and_free();
            verify(kept, 96, 5, "a child");
            _exit(0);
        }
        if (child != 0) {
            int status;
            CHECK(waitpid(child, &status, 0) == child);
            if (status != 0)
                FAIL("child %d ended with status %#x", (int)forks, status);
            child = 0;
        }
    }
    verify(kept, 96, 5, "the parent at the end");
    printf("ok small_handler_forks: %d\n", FORKS);
    return 0;
}
