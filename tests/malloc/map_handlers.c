/* Signal handlers that take mappings back while they interrupt the heap: what munmap says is so. A mapping that is
 * taken back serves again, and one that is not is as it was. One thread, so that nobody else has its addresses. */
#include "check.h"
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#define BYTES ((size_t)1 << 20)
#define ROUNDS 20000

static unsigned char *volatile mapped;
static volatile sig_atomic_t taken, refused;

static void on_alarm(int number) {
    (void)number;
    int before = errno;
    unsigned char *one = mapped;
    if (one && munmap(one, BYTES) == 0) {
        mapped = NULL;
        taken++;
    } else if (one) {
        if (errno != EAGAIN || one[0] != 1 || one[BYTES - 1] != 1)
            _exit(3);
        refused++;
    }
    errno = before;
}

static unsigned char *map(void *hint) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    unsigned char *at = mmap(hint, BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

/* Not at once where the daemon has still to answer what it was asked about that place. */
static unsigned char *map_at(unsigned char *place) {
    for (int tries = 0; tries < 1000; tries++) {
        unsigned char *one = map(place);
        if (one == place)
            return one;
        CHECK(munmap(one, BYTES) == 0);
        usleep(10000);
    }
    return NULL;
}

int main(void) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    struct itimerspec soon = {{0, 50 * 1000}, {0, 1000}};
    unsigned char *place = map(NULL);
    CHECK(munmap(place, BYTES) == 0);
    for (int i = 0; i < ROUNDS; i++) {
        unsigned char *one = map_at(place);
        if (!one)
            FAIL("round %d: what was taken back at %p does not serve again", i, (void *)place);
        one[0] = one[BYTES - 1] = 1;
        mapped = one;
        soon.it_value.tv_nsec = 1000 + i % 100 * 500;
        CHECK(timer_settime(timer, 0, &soon, NULL) == 0);
        while (mapped)
            for (int blocks = 0; blocks < 4; blocks++)
                free(need(BYTES));
    }
    printf("ok map_handlers: %d taken back, %d not at once\n", (int)taken, (int)refused);
    return 0;
}
