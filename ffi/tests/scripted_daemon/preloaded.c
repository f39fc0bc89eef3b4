/* A program under the preload library whose daemon refuses what the test's script says. WHAT names what is done;
 * each ends with "ok". */
#include "../../../tests/malloc/check.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* The compiler would leave out blocks that nobody uses. */
static void *(*volatile malloc_)(size_t) = malloc;

static void refused(size_t bytes) {
    errno = 0;
    if (malloc_(bytes) || errno != ENOMEM)
        FAIL("%zu bytes were served", bytes);
}

static void served(size_t bytes) {
    void *block = malloc_(bytes);
    if (!block)
        FAIL("%zu bytes were refused", bytes);
    memset(block, 1, 4096);
    free(block);
}

static void in_child(void (*act)(size_t), size_t bytes) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        act(bytes);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void *map(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* Less address space than the next arena needs. */
static void limit_addresses(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    size_t pages;
    CHECK(file && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    struct rlimit limit = {pages * 4096 + 512 * MIB, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

static void *wait_for_memory(void *unused) {
    (void)unused;
    void *block = malloc_(3 * GIB);
    /* Here it may end. */
    pthread_testcancel();
    return block;
}

static void *write_a_line(void *unused) {
    (void)unused;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    CHECK(pthread_cancel(pthread_self()) == 0);
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    void *block = malloc_(MIB);
    pthread_testcancel();
    return block;
}

static void cancelled(void *(*act)(void *), long after_ms) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, act, NULL) == 0);
    struct timespec pause = {0, after_ms * 1000000};
    nanosleep(&pause, NULL);
    void *outcome;
    CHECK(pthread_cancel(thread) == 0 || errno == ESRCH);
    CHECK(pthread_join(thread, &outcome) == 0);
    if (outcome != PTHREAD_CANCELED)
        FAIL("the thread gave %p", outcome);
}

int main(void) {
    const char *what = getenv("WHAT");
    CHECK(what && errno == 0);
    if (strcmp(what, "errno") == 0) {
        errno = 7;
        void *block = malloc_(16);
        CHECK(block && errno == 7);
        free(block);
        CHECK(errno == 7);
    } else if (strcmp(what, "refused") == 0) {
        refused(MIB);
        refused(MIB);
    } else if (strcmp(what, "served") == 0) {
        served(MIB);
        served(MIB);
    } else if (strcmp(what, "children") == 0) {
        refused(MIB);
        in_child(refused, MIB);
        refused(MIB);
    } else if (strcmp(what, "mapping") == 0) {
        CHECK(map(4 * MIB) != MAP_FAILED);
        refused(MIB);
        CHECK(map(4 * MIB) != MAP_FAILED);
        refused(MIB);
    } else if (strcmp(what, "addresses") == 0) {
        served(MIB);
        /* What no machine has is refused without a word, and hides nothing. */
        refused((size_t)1 << 62);
        limit_addresses();
        refused(5 * GIB);
        refused(5 * GIB);
        served(MIB);
    } else if (strcmp(what, "cancelled") == 0) {
        void *block = malloc_(3 * GIB);
        CHECK(block);
        free(block);
        cancelled(wait_for_memory, 300);
        served(MIB);
    } else if (strcmp(what, "cancelled-line") == 0) {
        cancelled(write_a_line, 0);
        refused(MIB);
    } else {
        FAIL("unknown: %s", what);
    }
    puts("ok");
    return 0;
}
