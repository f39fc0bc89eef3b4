/* Children of raw clones in a program whose other threads map memory all the time. Only the thread that clones comes
 * along, and mmap is a system call: the child must not wait for what another thread was in the middle of. The child
 * writes where the parent does, and what was there before stays the other's. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define BLOCK ((size_t)256 << 10)
#define THREADS 3
#define CLONES 60

static atomic_bool over;

static void map_and_verify(uint64_t seed, const char *who) {
    void *block = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(block != MAP_FAILED);
    fill(block, BLOCK, seed);
    verify_part(block, 0, BLOCK, seed, who);
    /* One that cannot be told which memory is managed may have to be asked again. */
    CHECK(munmap(block, BLOCK) == 0 || errno == EAGAIN);
}

static void *map_all_the_time(void *given) {
    for (uint64_t round = 0; !atomic_load(&over); round++)
        map_and_verify((uintptr_t)given + round * THREADS, "a thread's mapping");
    return NULL;
}

int main(void) {
    size_t bytes = working_set();
    unsigned char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    fill(memory, bytes, 1);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, map_all_the_time, (void *)(1000 + i)) == 0);
    for (uint64_t round = 0; round < CLONES; round++) {
        size_t at = round * BLOCK % (bytes - BLOCK);
        pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        CHECK(child >= 0);
        if (child == 0) {
            /* Ends one that waits for ever. */
            alarm(60);
            for (uint64_t i = 0; i < 5; i++)
                map_and_verify(round + i * CLONES, "a child's mapping");
            verify_part(memory, 0, at + BLOCK, 1, "what the child was given");
            fill(memory + at, BLOCK, 2 + round);
            verify_part(memory + at, 0, BLOCK, 2 + round, "what the child wrote");
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("child %" PRIu64 " ended with %#x: signal 14 if it waited", round, (unsigned)status);
        verify_part(memory, 0, at + BLOCK, 1, "the parent's");
    }
    atomic_store(&over, true);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    verify_part(memory, 0, bytes, 1, "the parent's at the end");
    printf("ok %d clones\n", CLONES);
    return 0;
}
