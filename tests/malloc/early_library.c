/* A library that allocates in its constructor, at exit, and in threads of its own. */
#include "check.h"
#include "of_allocator.h"
#include <pthread.h>

static unsigned char *early;
static size_t early_bytes = 3 << 20;

#ifdef OPENED
/* The first calls of all these, for which somebody waits who is in dlopen. */
static void *ask(void *unused) {
    malloc_trim(0);
    mallinfo();
    mallinfo2();
    FILE *nowhere = fopen("/dev/null", "w");
    CHECK(nowhere && malloc_info(0, nowhere) == 0);
    fclose(nowhere);
    if (mallctl)
        mallctl("epoch", NULL, NULL, NULL, 0);
    void *block = reallocarray(NULL, 10, 10);
    CHECK(block);
    if (free_sized)
        free_sized(block, 100);
    return unused;
}
#endif

__attribute__((constructor)) static void begin(void) {
#ifdef OPENED
    pthread_t asking;
    alarm(60);
    CHECK(pthread_create(&asking, NULL, ask, NULL) == 0 && pthread_join(asking, NULL) == 0);
    alarm(0);
#endif
    early = need(early_bytes);
    fill(early, early_bytes, 1);
    /* Kept for good by some libraries: freed by nobody. */
    void *kept = need(1 << 20);
    fill(kept, 1 << 20, 2);
}

__attribute__((destructor)) static void end(void) {
    verify(early, early_bytes, 1, "a block from before main, at exit");
    free(early);
    void *late = need(early_bytes);
    fill(late, early_bytes, 3);
    free(late);
}

static void *work(void *argument) {
    (void)argument;
    unsigned char *block = need(early_bytes);
    fill(block, early_bytes, 4);
    return block;
}

void early_check(void);
void early_check(void) {
    verify(early, early_bytes, 1, "a block from before main");
    early = realloc(early, early_bytes * 2);
    CHECK(early);
    verify(early, early_bytes, 1, "the same after realloc");
    pthread_t thread;
    void *block;
    CHECK(pthread_create(&thread, NULL, work, NULL) == 0 && pthread_join(thread, &block) == 0);
    verify(block, early_bytes, 4, "a block of a library's thread");
    free(block);
}
