/* One way of going through memory that was got with plain malloc; the same binary runs under tiermgr
 * and under kernel swap.
 *
 *   access WAY MIB SECONDS     WAY: sequential-read sequential-write random-read random-write
 *
 * Fills MIB first, untimed. Prints one JSON object. Latencies (random ways only) are of accesses whose
 * page was absent beforehand (mincore). Every value that is read is checked. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE 4096UL
#define WORDS (PAGE / sizeof(uint64_t))
#define SAMPLES_MAX 2000000UL

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

static int compare(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static void wrong(uint64_t page)
{
    fprintf(stderr, "page %lu holds wrong bytes\n", (unsigned long)page);
    exit(1);
}

static void fill_page(uint64_t *words, uint64_t page)
{
    for (uint64_t i = 0; i < WORDS; i++)
        words[i] = page + i;
}

static void check_page(const uint64_t *words, uint64_t page)
{
    uint64_t difference = 0;

    for (uint64_t i = 0; i < WORDS; i++)
        difference |= words[i] ^ (page + i);
    if (difference != 0)
        wrong(page);
}

int main(int argc, char **argv)
{
    static const char *const WAYS[] = {"sequential-read", "sequential-write", "random-read",
                                       "random-write"};
    int way = -1;
    uint64_t pages, done = 0, n = 0;
    size_t absent = 0;
    double seconds, start, took;
    uint64_t *words;
    float *samples;

    for (int i = 0; argc == 4 && i < 4; i++)
        if (strcmp(argv[1], WAYS[i]) == 0)
            way = i;
    if (way < 0) {
        fprintf(stderr, "usage: %s sequential-read|sequential-write|random-read|random-write "
                "MIB SECONDS\n", argv[0]);
        return 2;
    }
    pages = strtoul(argv[2], NULL, 10) << 8;
    seconds = strtod(argv[3], NULL);
    words = malloc(pages * PAGE);
    samples = mmap(NULL, SAMPLES_MAX * sizeof *samples, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == NULL || samples == MAP_FAILED) {
        fprintf(stderr, "allocating %s MiB: %s\n", argv[2], strerror(errno));
        return 1;
    }
    for (uint64_t page = 0; page < pages; page++)
        fill_page(words + page * WORDS, page);

    start = now();
    while ((took = now() - start) < seconds) {
        /* One clock reading for 256 pages; random ways read their own. */
        for (int i = 0; i < 256; i++, done++) {
            uint64_t page = way < 2 ? done % pages : mix(n++) % pages;
            uint64_t *at = words + page * WORDS;

            if (way == 0) {
                check_page(at, page);
            } else if (way == 1) {
                fill_page(at, page);
            } else {
                unsigned char present = 0;
                double before;

                if (mincore((void *)((uintptr_t)at & ~(PAGE - 1)), PAGE, &present) != 0)
                    present = 1;
                before = now();
                if (*(volatile uint64_t *)at != page)
                    wrong(page);
                if (way == 3)
                    *(volatile uint64_t *)at = page;
                if (!(present & 1) && absent < SAMPLES_MAX)
                    samples[absent++] = (float)((now() - before) * 1e6);
            }
        }
    }
    printf("{\"gb_per_s\": %.3f, \"accesses_per_s\": %.0f, \"absent\": %zu",
           way < 2 ? (double)(done * PAGE) / took / 1e9 : 0.0, (double)done / took, absent);
    if (absent > 0) {
        qsort(samples, absent, sizeof *samples, compare);
        printf(", \"p50_us\": %.1f, \"p99_us\": %.1f", (double)samples[absent / 2],
               (double)samples[absent * 99 / 100]);
    }
    puts("}");
    return 0;
}
