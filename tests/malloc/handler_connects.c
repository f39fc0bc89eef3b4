/* A signal handler forks while the first large block connects the program to the daemon: programs of this kind, one after
 * the other, each with its signal a little later. Neither they nor their children end or wait for long. */
#include "check.h"
#include <signal.h>
#include <sys/wait.h>

#define BYTES ((size_t)8 << 20)

static volatile sig_atomic_t inside;
static volatile pid_t child = -1;

static void on_signal(int number) {
    (void)number;
    int before = errno;
    if (inside && child == -1) {
        child = fork();
        if (child == 0)
            alarm(8);
    }
    errno = before;
}

static int connect_after(long microseconds) {
    alarm(8);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    struct itimerspec once = {{0, 0}, {0, microseconds * 1000}};
    CHECK(timer_settime(timer, 0, &once, NULL) == 0);
    inside = 1;
    unsigned char *first = need(BYTES);
    inside = 0;
    fill(first, BYTES, 1);
    verify(first, BYTES, 1, "the first block");
    free(first);
    unsigned char *second = need(BYTES);
    fill(second, BYTES, 2);
    verify(second, BYTES, 2, "the second block");
    if (child > 0) {
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("after %ld us: the child ended with status %#x", microseconds, status);
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count == 2)
        return connect_after(strtol(arguments[1], NULL, 10));
    for (long microseconds = 50; microseconds < 4000; microseconds += 100) {
        char text[24];
        snprintf(text, sizeof text, "%ld", microseconds);
        pid_t program = fork();
        CHECK(program >= 0);
        if (program == 0) {
            execl("/proc/self/exe", arguments[0], text, (char *)NULL);
            _exit(4);
        }
        int status;
        CHECK(waitpid(program, &status, 0) == program);
        if (status != 0)
            FAIL("after %ld us: status %#x", microseconds, status);
    }
    printf("ok handler_connects\n");
    return 0;
}
