/* Producers hand small objects over to consumers, which look at them and free them; each pair of threads
 * lives for one batch only. Meanwhile objects that stay fill the working set. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

#define PAIRS 4
#define BATCHES 12
#define OBJECTS 40000
#define SLOTS 1024

struct queue {
    _Atomic(uint64_t *) slots[SLOTS];
};

static size_t bytes_of(size_t index) { return 16 + index * 40 % 480; }

static void *produce(void *argument) {
    struct queue *queue = argument;
    for (size_t i = 0; i < OBJECTS; i++) {
        uint64_t *object = need(bytes_of(i));
        fill(object, bytes_of(i), i);
        while (atomic_load(&queue->slots[i % SLOTS]))
            sched_yield();
        atomic_store(&queue->slots[i % SLOTS], object);
    }
    return NULL;
}

static void *consume(void *argument) {
    struct queue *queue = argument;
    for (size_t i = 0; i < OBJECTS; i++) {
        uint64_t *object;
        while (!(object = atomic_exchange(&queue->slots[i % SLOTS], NULL)))
            sched_yield();
        verify(object, bytes_of(i), i, "an object from another thread");
        free(object);
    }
    return NULL;
}

int main(void) {
    size_t count = working_set() / 240;
    uint64_t **staying = need(count * sizeof *staying);
    size_t made = 0;
    for (size_t batch = 0; batch < BATCHES; batch++) {
        static struct queue queues[PAIRS];
        pthread_t handles[2 * PAIRS];
        for (size_t i = 0; i < PAIRS; i++) {
            CHECK(pthread_create(&handles[2 * i], NULL, produce, &queues[i]) == 0);
            CHECK(pthread_create(&handles[2 * i + 1], NULL, consume, &queues[i]) == 0);
        }
        for (; made < count * (batch + 1) / BATCHES; made++) {
            staying[made] = need(bytes_of(made));
            fill(staying[made], bytes_of(made), made);
        }
        for (size_t i = 0; i < 2 * PAIRS; i++)
            CHECK(pthread_join(handles[i], NULL) == 0);
    }
    for (size_t i = 0; i < count; i++) {
        verify(staying[i], bytes_of(i), i, "an object that stayed");
        free(staying[i]);
    }
    free(staying);
    printf("ok small_queue: %zu objects stayed, %d were handed over\n", count,
           PAIRS * BATCHES * OBJECTS);
    return 0;
}
