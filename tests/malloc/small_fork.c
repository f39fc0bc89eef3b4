/* A process with threads that allocate all the time forks again and again. Each child looks at what was
 * there, frees some of it, makes more, forks itself, and ends. Handlers of the program allocate and free on
 * both sides of the fork. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define FORKS 10
#define THREADS 3
#define KEPT 2000

static atomic_bool done;
static size_t count;
static uint64_t **objects;

static size_t bytes_of(size_t index) { return 16 + index * 24 % 400; }

static void allocate_some(void) {
    void *kept[64];
    for (size_t i = 0; i < 64; i++) {
        kept[i] = need(bytes_of(i));
        fill(kept[i], bytes_of(i), i);
    }
    kept[0] = realloc(kept[0], 300);
    CHECK(kept[0]);
    for (size_t i = 0; i < 64; i++) {
        verify(kept[i], i == 0 ? 16 : bytes_of(i), i, "an object around a fork");
        free(kept[i]);
    }
}

static void *churn(void *argument) {
    uint64_t chance = (uintptr_t)argument + 1;
    uint64_t *kept[KEPT] = {0};
    size_t seeds[KEPT];
    while (!atomic_load(&done)) {
        chance = chance * 6364136223846793005u + 1442695040888963407u;
        size_t slot = (chance >> 33) % KEPT;
        if (kept[slot])
            verify(kept[slot], bytes_of(seeds[slot]), seeds[slot], "an object of a thread");
        free(kept[slot]);
        seeds[slot] = chance >> 40;
        kept[slot] = need(bytes_of(seeds[slot]));
        fill(kept[slot], bytes_of(seeds[slot]), seeds[slot]);
    }
    for (size_t i = 0; i < KEPT; i++)
        free(kept[i]);
    return NULL;
}

static void child(void) {
    for (size_t i = (size_t)getpid() % 997; i < count; i += 997) {
        verify(objects[i], bytes_of(i), i, "an object of the parent's");
        free(objects[i]);
        objects[i] = need(bytes_of(i + 1));
        fill(objects[i], bytes_of(i + 1), 7);
        verify(objects[i], bytes_of(i + 1), 7, "an object of the child's");
    }
    pid_t grandchild = fork();
    CHECK(grandchild >= 0);
    if (grandchild == 0) {
        allocate_some();
        _exit(0);
    }
    int status;
    CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
}

int main(void) {
    count = working_set() / 216;
    objects = need(count * sizeof *objects);
    for (size_t i = 0; i < count; i++) {
        objects[i] = need(bytes_of(i));
        fill(objects[i], bytes_of(i), i);
    }
    CHECK(pthread_atfork(allocate_some, allocate_some, allocate_some) == 0);
    pthread_t handles[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&handles[i], NULL, churn, (void *)(uintptr_t)i) == 0);
    for (size_t i = 0; i < FORKS; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            child();
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        if (status != 0)
            FAIL("child %zu ended with status %#x", i, status);
    }
    atomic_store(&done, true);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(handles[i], NULL) == 0);
    for (size_t i = 0; i < count; i++) {
        verify(objects[i], bytes_of(i), i, "an object of the parent's, at the end");
        free(objects[i]);
    }
    printf("ok small_fork: %d forks, %zu objects\n", FORKS, count);
    return 0;
}
