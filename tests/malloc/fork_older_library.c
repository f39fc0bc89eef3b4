/* Its constructor runs before that of a library in LD_PRELOAD. It keeps its mutex across forks, as libraries do that
 * threads use, and allocates while it holds it. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* A fork has come to where it waits for the mutex. */
static atomic_bool forking;

static void use(size_t bytes) {
    void *block = need(bytes);
    fill(block, bytes, bytes);
    verify(block, bytes, bytes, "a block of a library's");
    free(block);
}

static void prepare(void) {
    atomic_store(&forking, true);
    pthread_mutex_lock(&mutex);
    use(1 << 20);
}

static void after(void) {
    use(100);
    use(1 << 20);
    atomic_store(&forking, false);
    pthread_mutex_unlock(&mutex);
    use(1 << 20);
}

__attribute__((constructor)) static void begin(void) {
    CHECK(pthread_atfork(prepare, after, after) == 0);
}

/* Takes the mutex, says so, and allocates under it once somebody forks. */
void allocate_in_a_fork(size_t bytes, atomic_bool *taken);
void allocate_in_a_fork(size_t bytes, atomic_bool *taken) {
    pthread_mutex_lock(&mutex);
    atomic_store(taken, true);
    while (!atomic_load(&forking))
        sched_yield();
    use(bytes);
    pthread_mutex_unlock(&mutex);
}
