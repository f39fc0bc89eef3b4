/* Forks while a thread is in a library that has handlers around forks, older than the allocator's: the fork waits for
 * the thread there, and the thread allocates. Each side of the fork has its bytes. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define FORKS 20

void allocate_in_a_fork(size_t bytes, atomic_bool *taken);

static atomic_bool taken;

static void *in_library(void *bytes) {
    allocate_in_a_fork((size_t)(uintptr_t)bytes, &taken);
    return NULL;
}

int main(void) {
    const size_t sizes[] = {100, 20000, 1 << 20, 3 << 20};
    size_t bytes = 8 << 20;
    uint64_t *memory = need(bytes);
    fill(memory, bytes, 1);
    alarm(60);
    for (size_t i = 0; i < FORKS; i++) {
        pthread_t thread;
        atomic_store(&taken, false);
        CHECK(pthread_create(&thread, NULL, in_library, (void *)(uintptr_t)sizes[i % 4]) == 0);
        while (!atomic_load(&taken))
            sched_yield();
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(30);
            verify(memory, bytes, 1, "a child");
            fill(memory, bytes, i);
            verify(memory, bytes, i, "a child");
            free(need(5 << 20));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("a child ended with status %#x", status);
        CHECK(pthread_join(thread, NULL) == 0);
        verify(memory, bytes, 1, "the parent");
    }
    printf("ok fork_older: %d forks\n", FORKS);
    return 0;
}
