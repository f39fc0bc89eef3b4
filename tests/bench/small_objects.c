/* What small objects cost where everything fits. Prints one JSON object.
 *
 * `small_objects held COUNT ROUNDS` makes COUNT objects of 16 to 256 bytes, replaces as many of them at
 * random in each round, and looks at all of them: bytes held for each byte asked for, and nanoseconds for each
 * step.
 *
 * `small_objects churn THREADS LEAST MOST REPLACEMENTS`: each thread keeps 16 MiB of objects of LEAST to MOST
 * bytes and replaces them at random. `queue THREADS ITEMS`: half of the threads make objects, of 16 to 1024
 * bytes, which the other half frees. `grow THREADS ARRAYS`: each thread lets arrays grow by realloc, as vectors
 * and as strings do. All print operations a second, and a second of
 * CPU time, of all threads together, first touches included. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define THREADS_MAX 64
#define LIVE_BYTES ((size_t)16 << 20)
#define SLOTS 1024
#define BATCH 64

struct work {
    pthread_t thread;
    uint64_t chance;
    size_t least, most, count;
    struct ring *ring;
    bool failed;
};

/* Batches of objects on their way from one thread to another. */
struct ring {
    _Atomic size_t head, tail;
    void *objects[SLOTS][BATCH];
};

static uint64_t next(uint64_t *chance)
{
    *chance ^= *chance << 13;
    *chance ^= *chance >> 7;
    *chance ^= *chance << 17;
    return *chance;
}

static double ns_of(clockid_t clock)
{
    struct timespec at;

    clock_gettime(clock, &at);
    return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

static double now(void) { return ns_of(CLOCK_MONOTONIC); }

/* CPU time of all threads: a busy machine changes it less. */
static double used(void) { return ns_of(CLOCK_PROCESS_CPUTIME_ID); }

/* Anonymous memory of this process. */
static double held(void)
{
    char line[256];
    double kib = 0;
    FILE *status = fopen("/proc/self/status", "r");

    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %lf kB", &kib) == 1)
            break;
    if (status)
        fclose(status);
    return kib * 1024;
}

static size_t bytes_of(uint64_t word) { return 16 + (word >> 20) % 241; }

static int hold(size_t count, size_t rounds)
{
    double asked = 0, began, made, churned, read, sum = 0;
    uint64_t chance = 88172645463325252u, **objects = calloc(count, sizeof *objects);

    if (!objects)
        return 1;
    memset(objects, 0xff, count * sizeof *objects);
    double before = held();
    began = used();
    for (size_t i = 0; i < count; i++) {
        uint64_t word = next(&chance);

        objects[i] = malloc(bytes_of(word));
        objects[i][0] = word;
        asked += (double)bytes_of(word);
    }
    made = used() - began;
    double full = held() - before;
    began = used();
    for (size_t i = 0; i < count * rounds; i++) {
        uint64_t word = next(&chance);
        size_t any = next(&chance) % count;

        asked -= (double)bytes_of(objects[any][0]);
        free(objects[any]);
        objects[any] = malloc(bytes_of(word));
        objects[any][0] = word;
        asked += (double)bytes_of(word);
    }
    churned = used() - began;
    began = used();
    for (size_t i = 0; i < count; i++)
        sum += (double)bytes_of(objects[i][0]);
    read = used() - began;
    if (sum != asked) {
        fprintf(stderr, "the objects are not what was written\n");
        return 1;
    }
    printf("{\"ns_per_malloc\": %.1f, \"ns_per_replacement\": %.1f, \"ns_per_read\": %.1f, "
           "\"held_per_byte_full\": %.3f, \"held_per_byte_churned\": %.3f}\n",
           made / (double)count, churned / (double)(count * rounds), read / (double)count,
           full / asked, (held() - before) / asked);
    return 0;
}

/* An object with its first and its last word written, so that it can be told from another. */
static uint64_t *make(size_t bytes, uint64_t word)
{
    uint64_t *object = malloc(bytes);

    if (object) {
        object[bytes / 8 - 1] = word;
        object[0] = word;
    }
    return object;
}

static void *churn(void *argument)
{
    struct work *work = argument;
    size_t span = work->most - work->least + 1;
    size_t live = LIVE_BYTES / ((work->least + work->most) / 2);
    uint64_t **objects = calloc(live, sizeof *objects);

    if (!objects)
        abort();
    for (size_t i = 0; i < live + work->count; i++) {
        uint64_t word = next(&work->chance);
        size_t at = i < live ? i : (word >> 32) % live;

        if (objects[at])
            work->failed |= objects[at][0] >> 24 != at;
        free(objects[at]);
        objects[at] = make(work->least + (word & 0xffffff) % span, (uint64_t)at << 24 | (word & 0xffffff));
        if (!objects[at])
            abort();
    }
    for (size_t i = 0; i < live; i++) {
        size_t bytes = work->least + (objects[i][0] & 0xffffff) % span;

        work->failed |= objects[i][bytes / 8 - 1] != objects[i][0];
        free(objects[i]);
    }
    free(objects);
    return NULL;
}

static void *produce(void *argument)
{
    struct work *work = argument;
    struct ring *ring = work->ring;

    for (size_t batch = 0; batch < work->count; batch++) {
        while (batch - atomic_load_explicit(&ring->tail, memory_order_acquire) >= SLOTS)
            sched_yield();
        for (size_t i = 0; i < BATCH; i++) {
            ring->objects[batch % SLOTS][i] = make(16 + next(&work->chance) % 1009, batch);
            if (!ring->objects[batch % SLOTS][i])
                abort();
        }
        atomic_store_explicit(&ring->head, batch + 1, memory_order_release);
    }
    return NULL;
}

static void *consume(void *argument)
{
    struct work *work = argument;
    struct ring *ring = work->ring;

    for (size_t batch = 0; batch < work->count; batch++) {
        while (atomic_load_explicit(&ring->head, memory_order_acquire) == batch)
            sched_yield();
        for (size_t i = 0; i < BATCH; i++) {
            uint64_t *object = ring->objects[batch % SLOTS][i];

            work->failed |= object[0] != batch;
            free(object);
        }
        atomic_store_explicit(&ring->tail, batch + 1, memory_order_release);
    }
    return NULL;
}

static void *grow(void *argument)
{
    struct work *work = argument;

    for (size_t i = 0; i < work->count; i++) {
        size_t most = 256 + next(&work->chance) % (i % 16 ? 4096 : 100000);
        uint64_t *array = NULL;

        for (size_t bytes = 16; bytes < most; bytes += i % 2 ? bytes / 2 / 8 * 8 : 64) {
            array = realloc(array, bytes);
            if (!array)
                abort();
            if (bytes == 16)
                array[0] = i;
            array[bytes / 8 - 1] = i;
        }
        work->failed |= array[0] != i;
        free(array);
    }
    return NULL;
}

static int run(size_t threads, void *(*first)(void *), void *(*second)(void *), struct work form,
               double operations)
{
    static struct work works[THREADS_MAX];
    bool failed = false;
    /* What an allocator does once is not asked for here. */
    void *warm = malloc(100);
    double began = now(), began_used = used();

    free(warm);

    for (size_t i = 0; i < threads; i++) {
        works[i] = form;
        works[i].chance = 88172645463325252u + i;
        if (second)
            works[i].ring = i % 2 ? works[i - 1].ring : calloc(1, sizeof(struct ring));
        if (pthread_create(&works[i].thread, NULL, second && i % 2 ? second : first, &works[i]))
            return 1;
    }
    for (size_t i = 0; i < threads; i++) {
        pthread_join(works[i].thread, NULL);
        failed |= works[i].failed;
    }
    double took = now() - began, took_used = used() - began_used;
    if (failed) {
        fprintf(stderr, "the objects are not what was written\n");
        return 1;
    }
    printf("{\"per_s\": %.0f, \"per_cpu_s\": %.0f}\n", operations * 1e9 / took,
           operations * 1e9 / took_used);
    return 0;
}

int main(int argc, char **argv)
{
    size_t numbers[4] = {0};

    for (int i = 2; i < argc && i < 6; i++)
        numbers[i - 2] = strtoul(argv[i], NULL, 10);
    size_t threads = numbers[0];
    struct work form = {.count = numbers[1]};
    if (argc == 4 && numbers[0] && numbers[1] && strcmp(argv[1], "held") == 0)
        return hold(numbers[0], numbers[1]);
    if (threads > 0 && threads <= THREADS_MAX) {
        if (argc == 6 && strcmp(argv[1], "churn") == 0 && numbers[1] >= 8 && numbers[2] >= numbers[1]) {
            form = (struct work){.least = numbers[1], .most = numbers[2], .count = numbers[3]};
            return run(threads, churn, NULL, form, (double)(threads * numbers[3]));
        }
        if (argc == 4 && strcmp(argv[1], "queue") == 0 && threads % 2 == 0)
            return run(threads, produce, consume, form, (double)(threads / 2 * numbers[1] * BATCH));
        if (argc == 4 && strcmp(argv[1], "grow") == 0)
            return run(threads, grow, NULL, form, (double)(threads * numbers[1]));
    }
    fprintf(stderr, "usage: %s held COUNT ROUNDS | churn THREADS LEAST MOST REPLACEMENTS | "
                    "queue THREADS BATCHES | grow THREADS ARRAYS\n", argv[0]);
    return 2;
}
