/* What the device gives to somebody who asks it directly: `raw_device FILE`, a file of at least 1 GiB.
 *
 * O_DIRECT. Streams: 2 MiB requests into and from huge-page-backed aligned memory, one thread. Random:
 * 4 KiB at depth 1 and at depth 16 (sixteen threads). Prints one JSON object. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BYTES (1024UL << 20)
#define LARGE (2UL << 20)
#define SMALL 4096UL
#define THREADS 16
#define SECONDS 2.0
#define SAMPLES_MAX 200000

static const char *path;

static void die(const char *what)
{
    fprintf(stderr, "%s %s: %s\n", what, path, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

static char *buffer(void)
{
    char *at = mmap(NULL, 2 * LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (at == MAP_FAILED)
        die("memory for");
    at = (char *)(((uintptr_t)at + LARGE - 1) & ~(LARGE - 1));
    madvise(at, LARGE, MADV_HUGEPAGE);
    memset(at, 7, LARGE);
    return at;
}

static double stream(int fd, int writing)
{
    char *at = buffer();
    double start = now();

    for (uint64_t offset = 0; offset < BYTES; offset += LARGE) {
        ssize_t moved = writing ? pwrite(fd, at, LARGE, (off_t)offset)
                                : pread(fd, at, LARGE, (off_t)offset);

        if (moved != (ssize_t)LARGE)
            die(writing ? "writing" : "reading");
    }
    return (double)BYTES / (now() - start) / 1e9;
}

struct reader {
    pthread_t thread;
    int fd;
    uint64_t seed, reads;
    float *samples;
};

static void *read_randomly(void *arg)
{
    struct reader *self = arg;
    char *at = buffer();
    double end = now() + SECONDS;

    for (;;) {
        double start = now();
        off_t offset = (off_t)(mix(self->seed++) % (BYTES / SMALL) * SMALL);

        if (start >= end)
            return NULL;
        if (pread(self->fd, at, SMALL, offset) != (ssize_t)SMALL)
            die("reading");
        if (self->samples != NULL && self->reads < SAMPLES_MAX)
            self->samples[self->reads] = (float)((now() - start) * 1e6);
        self->reads++;
    }
}

static int compare(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    struct reader readers[THREADS];
    static float samples[SAMPLES_MAX];
    double write_gb, read_gb;
    uint64_t single, many = 0;
    int fd;

    if (argc != 2) {
        fprintf(stderr, "usage: %s FILE\n", argv[0]);
        return 2;
    }
    path = argv[1];
    fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0)
        die("opening");
    stream(fd, 1);
    write_gb = stream(fd, 1);
    read_gb = stream(fd, 0);
    readers[0] = (struct reader){.fd = fd, .seed = 1, .samples = samples};
    read_randomly(&readers[0]);
    single = readers[0].reads < SAMPLES_MAX ? readers[0].reads : SAMPLES_MAX;
    qsort(samples, single, sizeof *samples, compare);
    for (int i = 0; i < THREADS; i++) {
        readers[i] = (struct reader){.fd = fd, .seed = (uint64_t)i << 32};
        if (pthread_create(&readers[i].thread, NULL, read_randomly, &readers[i]) != 0)
            die("threads for");
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(readers[i].thread, NULL);
        many += readers[i].reads;
    }
    printf("{\"write_gb_per_s\": %.2f, \"read_gb_per_s\": %.2f, \"p50_us\": %.1f, \"p99_us\": %.1f, "
           "\"iops_depth_16\": %.0f}\n", write_gb, read_gb, (double)samples[single / 2],
           (double)samples[single * 99 / 100], (double)many / SECONDS);
    return 0;
}
