/* A thread with a small stack is the first that allocates: the client is made there. */
#include "check.h"
#include <pthread.h>

#define BYTES ((size_t)1 << 20)
#define STACK_BYTES ((size_t)24 << 10)

static void *first(void *unused) {
    (void)unused;
    unsigned char *block = malloc(BYTES);
    if (block)
        block[0] = block[BYTES - 1] = 1;
    return block;
}

int main(void) {
    pthread_attr_t small;
    pthread_t thread;
    void *block;
    CHECK(pthread_attr_init(&small) == 0);
    CHECK(pthread_attr_setstacksize(&small, STACK_BYTES) == 0);
    CHECK(pthread_create(&thread, &small, first, NULL) == 0);
    CHECK(pthread_join(thread, &block) == 0 && block);
    CHECK(!getenv("EXPECT_MANAGED") || is_managed(block));
    free(block);
    printf("ok small_stack: %zu bytes\n", STACK_BYTES);
    return 0;
}
