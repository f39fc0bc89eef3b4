/* THREADS threads hold small objects of SIZE bytes together, free and replace runs of them, and look at
 * every byte of each before it goes. Threads come and go: what one has made another frees. */
#include "check.h"
#include <pthread.h>

#define SIZE_LEAST ((size_t)16)
#define SIZE_MOST ((size_t)512)
#define ROUNDS 3
/* Objects that are replaced together. */
#define RUN 256

/* An object begins with its seed and its length. */
struct object {
    uint32_t seed, bytes;
    unsigned char rest[];
};

static size_t threads, objects_each;
/* One table for each thread; the threads of the next round take over the table of a neighbour. */
static struct object **tables[64];

static uint64_t next(uint64_t *chance) {
    *chance = *chance * 6364136223846793005u + 1442695040888963407u;
    return *chance >> 33;
}

static struct object *make(uint64_t *chance) {
    size_t bytes = SIZE_LEAST + next(chance) % (SIZE_MOST - SIZE_LEAST + 1);
    struct object *object = next(chance) % 2 ? need(bytes) : calloc(1, bytes);
    CHECK(object && (uintptr_t)object % 16 == 0);
    object->seed = (uint32_t)next(chance);
    object->bytes = (uint32_t)bytes;
    memset(object->rest, (int)(object->seed & 0xff), bytes - sizeof *object);
    return object;
}

static void look(const struct object *object, const char *when) {
    for (size_t i = 0; i < object->bytes - sizeof *object; i++)
        if (object->rest[i] != (object->seed & 0xff))
            FAIL("%s: byte %zu of the object at %p of %u bytes: found %02x, wanted %02x", when, i,
                 (const void *)object, object->bytes, object->rest[i], object->seed & 0xff);
}

static void *work(void *argument) {
    size_t thread = (uintptr_t)argument % 64, round = (uintptr_t)argument / 64;
    struct object **objects = tables[(thread + round) % threads];
    uint64_t chance = (uintptr_t)argument + 1;
    for (size_t i = 0; round == 0 && i < objects_each; i++)
        objects[i] = make(&chance);
    for (size_t i = 0; i < objects_each / 16; i += RUN) {
        size_t any = next(&chance) % (objects_each - RUN);
        for (size_t k = any; k < any + RUN; k++) {
            look(objects[k], "before it is freed");
            free(objects[k]);
        }
        for (size_t k = any; k < any + RUN; k++)
            objects[k] = make(&chance);
    }
    for (size_t i = 0; i < objects_each; i++)
        look(objects[i], "at the end of a round");
    return NULL;
}

int main(void) {
    threads = setting("THREADS", "1");
    CHECK(threads >= 1 && threads <= 64);
    objects_each = working_set() / ((SIZE_LEAST + SIZE_MOST) / 2) / threads;
    for (size_t i = 0; i < threads; i++)
        tables[i] = need(objects_each * sizeof *tables[i]);
    for (size_t round = 0; round < ROUNDS; round++) {
        pthread_t handles[64];
        for (size_t i = 0; i < threads; i++)
            CHECK(pthread_create(&handles[i], NULL, work, (void *)(uintptr_t)(round * 64 + i)) == 0);
        for (size_t i = 0; i < threads; i++)
            CHECK(pthread_join(handles[i], NULL) == 0);
    }
    for (size_t i = 0; i < threads; i++) {
        for (size_t k = 0; k < objects_each; k++)
            free(tables[i][k]);
        free(tables[i]);
    }
    printf("ok small_churn: %zu threads, %zu objects each\n", threads, objects_each);
    return 0;
}
