/* How long a page fault takes that another process answers with zeros, no device involved.
 *
 *   fault_service bare FAULTS     a handler of forty lines that spins and does nothing else: the floor
 *   fault_service tiermgr FAULTS  the daemon at $TIERMGR_SOCKET, which must have room for them all
 *
 * Prints one JSON object with microseconds. Every access is the first one of a 64 KiB extent, in
 * random order, and is counted only if the page was absent before (mincore). */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tiermgr.h"

#define PAGE 4096UL
#define EXTENT 65536UL
#define REGION (1024UL << 20)

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Serves the faults of its parent until the parent ends. */
static void serve(int uffd)
{
    static char zeros[PAGE] __attribute__((aligned(4096)));

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        struct uffd_msg msg;

        if (read(uffd, &msg, sizeof msg) != (ssize_t)sizeof msg)
            continue;
        if (msg.event != UFFD_EVENT_PAGEFAULT)
            continue;
        struct uffdio_copy copy = {
            .dst = msg.arg.pagefault.address & ~(PAGE - 1),
            .src = (uint64_t)(uintptr_t)zeros,
            .len = PAGE,
        };

        if (ioctl(uffd, UFFDIO_COPY, &copy) != 0 && errno != EEXIST)
            die("UFFDIO_COPY");
    }
}

static char *arm_bare(pid_t *handler)
{
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    char *at = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int uffd;

    if (device < 0)
        die("opening /dev/userfaultfd");
    uffd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) != 0 || at == MAP_FAILED)
        die("making a userfaultfd and its range");
    struct uffdio_register range = {
        .range = {.start = (uint64_t)(uintptr_t)at, .len = REGION},
        .mode = UFFDIO_REGISTER_MODE_MISSING,
    };

    if (ioctl(uffd, UFFDIO_REGISTER, &range) != 0)
        die("UFFDIO_REGISTER");
    *handler = fork();
    if (*handler < 0)
        die("fork");
    if (*handler == 0)
        serve(uffd);
    return at;
}

static char *arm_tiermgr(void)
{
    tiermgr_client *client;
    tiermgr_region *region;

    if (tiermgr_connect(NULL, &client) != TIERMGR_OK ||
        tiermgr_region_create(client, REGION, NULL, &region) != TIERMGR_OK) {
        fprintf(stderr, "%s\n", tiermgr_last_error());
        exit(1);
    }
    return tiermgr_region_address(region);
}

int main(int argc, char **argv)
{
    int bare = argc == 3 && strcmp(argv[1], "bare") == 0;
    size_t faults = argc == 3 ? strtoul(argv[2], NULL, 10) : 0, counted = 0;
    size_t extents = REGION / EXTENT;
    double *took, sum = 0;
    uint32_t *order;
    pid_t handler = 0;
    char *at;

    if (faults == 0 || faults > extents || (!bare && strcmp(argv[1], "tiermgr") != 0)) {
        fprintf(stderr, "usage: %s bare|tiermgr FAULTS (at most %zu)\n", argv[0], extents);
        return 2;
    }
    at = bare ? arm_bare(&handler) : arm_tiermgr();
    took = calloc(faults, sizeof *took);
    order = calloc(extents, sizeof *order);
    if (took == NULL || order == NULL)
        die("calloc");
    for (uint32_t i = 0; i < extents; i++)
        order[i] = i;
    for (size_t i = extents - 1; i > 0; i--) {
        size_t j = mix(i) % (i + 1);
        uint32_t kept = order[i];

        order[i] = order[j];
        order[j] = kept;
    }
    for (size_t i = 0; i < faults; i++) {
        volatile char *page = at + order[i] * EXTENT;
        unsigned char present = 0;
        double start;

        if (mincore((void *)(uintptr_t)page, PAGE, &present) != 0)
            die("mincore");
        start = now_us();
        if (*page != 0) {
            fprintf(stderr, "a page that nobody wrote is not zero\n");
            return 1;
        }
        start = now_us() - start;
        if (present & 1)
            continue;
        took[counted++] = start;
        sum += start;
    }
    if (handler > 0) {
        kill(handler, SIGKILL);
        waitpid(handler, NULL, 0);
    }
    if (counted == 0) {
        fprintf(stderr, "no page was absent\n");
        return 1;
    }
    qsort(took, counted, sizeof *took, compare);
    printf("{\"faults\": %zu, \"p50_us\": %.2f, \"p90_us\": %.2f, \"p99_us\": %.2f, \"mean_us\": %.2f}\n",
           counted, took[counted / 2], took[counted * 9 / 10], took[counted * 99 / 100],
           sum / (double)counted);
    return 0;
}
