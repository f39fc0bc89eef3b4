/* A malloc that a program is linked with. It has one mutex, and keeps that across forks. */
#include "check.h"
#include <pthread.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

__attribute__((constructor)) static void begin(void) {
    CHECK(pthread_atfork(lock, unlock, unlock) == 0);
}

#define LOCKED(type, call)                                                                         \
    {                                                                                              \
        lock();                                                                                    \
        type result = call;                                                                        \
        unlock();                                                                                  \
        return result;                                                                             \
    }

void *malloc(size_t bytes) LOCKED(void *, __libc_malloc(bytes))
void *calloc(size_t count, size_t size) LOCKED(void *, __libc_calloc(count, size))
void *realloc(void *block, size_t bytes) LOCKED(void *, __libc_realloc(block, bytes))
void *memalign(size_t align, size_t bytes) LOCKED(void *, __libc_memalign(align, bytes))
void *aligned_alloc(size_t align, size_t bytes) LOCKED(void *, __libc_memalign(align, bytes))
void free(void *block) {
    lock();
    __libc_free(block);
    unlock();
}
