/* A library that allocates in its constructor, at exit, and in threads of its own. */
#include "check.h"
#include <pthread.h>

static unsigned char *early;
static size_t early_bytes = 3 << 20;

__attribute__((constructor)) static void begin(void) {
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
