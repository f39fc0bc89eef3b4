/* Who may make and free blocks when: before main and after it, in handlers and destructors, in threads that
 * end, in libraries that come and go, and in forked children. Each row of the table runs in a child of
 * its own, so that it may end as it likes; LIBRARY names a library to open. */
#include "check.h"
#include <dlfcn.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>

extern char **environ;
void *library_block(size_t bytes);
int __cxa_thread_atexit_impl(void (*)(void *), void *, void *);
extern void *__dso_handle;

static const size_t sizes[] = {1, 16, 100, 1000, 5000, 40000, 131071, 131072, 300000, 3 << 20};
#define SIZES (sizeof sizes / sizeof *sizes)
#define THREADS 4

struct set {
    unsigned char *blocks[SIZES];
};

static void make(struct set *set, uint64_t seed) {
    for (size_t i = 0; i < SIZES; i++)
        fill(set->blocks[i] = need(sizes[i]), sizes[i], seed + i);
}

static void check(const struct set *set, uint64_t seed, const char *what) {
    for (size_t i = 0; i < SIZES; i++)
        verify(set->blocks[i], sizes[i], seed + i, what);
}

static void drop(struct set *set, uint64_t seed, const char *what) {
    check(set, seed, what);
    for (size_t i = 0; i < SIZES; i++) {
        errno = 77;
        free(set->blocks[i]);
        if (errno != 77)
            FAIL("%s: free changed errno to %d", what, errno);
    }
}

static void resize(struct set *set, uint64_t seed, const char *what) {
    for (size_t i = 0; i < SIZES; i++) {
        set->blocks[i] = realloc(set->blocks[i], sizes[i] * 2);
        CHECK(set->blocks[i]);
    }
    check(set, seed, what);
}

static pthread_t begin(void *(*work)(void *), void *argument) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, argument) == 0);
    return thread;
}

static void join(pthread_t thread) { CHECK(pthread_join(thread, NULL) == 0); }

/* Before any constructor. */
static struct set earliest;
static void before_constructors(void) { make(&earliest, 10); }
__attribute__((section(".preinit_array"), used)) static void (*preinit)(void) = before_constructors;

static void made_before_constructors(void) {
    check(&earliest, 10, "blocks from before all constructors");
    resize(&earliest, 10, "blocks from before all constructors, resized");
    drop(&earliest, 10, "blocks from before all constructors");
}

static void *make_all(void *set) {
    make(set, 20);
    return NULL;
}

static void *drop_all(void *set) {
    drop(set, 20, "blocks of a thread that has ended");
    return NULL;
}

static void *resize_all(void *set) {
    resize(set, 20, "blocks of a thread that has ended, resized");
    return NULL;
}

static void freed_by_another_thread(void) {
    struct set sets[8];
    for (size_t i = 0; i < 8; i++) {
        join(begin(make_all, &sets[i]));
        if (i % 2)
            join(begin(resize_all, &sets[i]));
    }
    for (size_t i = 0; i < 8; i += 2)
        join(begin(drop_all, &sets[i]));
    for (size_t i = 1; i < 8; i += 2)
        drop(&sets[i], 20, "blocks of a thread that has ended");
}

static pthread_key_t keys[2];
static atomic_uint values_destroyed, threads_destroyed;

/* Runs again as long as it leaves a value, and after whatever the allocator has there of its own. */
static void key_destructor(void *value) {
    struct set *set = value;
    drop(set, 20, "blocks in the destructor of a key");
    free(set);
    unsigned before = atomic_fetch_add(&values_destroyed, 1);
    if (before % 3 < 2) {
        set = need(sizeof *set);
        make(set, 20);
        CHECK(pthread_setspecific(keys[before % 2], set) == 0);
    }
}

static void thread_destructor(void *value) {
    drop(value, 20, "blocks in a destructor of thread-local storage");
    free(value);
    free(need(200));
    free(need(200000));
    atomic_fetch_add(&threads_destroyed, 1);
}

static void *leave_values(void *argument) {
    (void)argument;
    struct set *set = need(sizeof *set), *other = need(sizeof *other);
    make(set, 20);
    make(other, 20);
    CHECK(pthread_setspecific(keys[0], set) == 0);
    CHECK(__cxa_thread_atexit_impl(thread_destructor, other, &__dso_handle) == 0);
    return NULL;
}

static void freed_in_tls_destructors(void) {
    for (size_t i = 0; i < 2; i++)
        CHECK(pthread_key_create(&keys[i], key_destructor) == 0);
    for (unsigned i = 1; i <= 8; i++) {
        join(begin(leave_values, NULL));
        CHECK(atomic_load(&values_destroyed) == 3 * i && atomic_load(&threads_destroyed) == i);
    }
}

static atomic_uint laps;

__attribute__((noreturn)) static void *allocate_for_ever(void *argument) {
    (void)argument;
    for (;;) {
        struct set set;
        make(&set, 20);
        resize(&set, 20, "blocks while the process ends");
        drop(&set, 20, "blocks while the process ends");
        atomic_fetch_add(&laps, 1);
    }
}

static struct set at_exit_set;

static void at_exit(void) {
    drop(&at_exit_set, 30, "blocks in a handler of exit");
    make(&at_exit_set, 30);
    drop(&at_exit_set, 30, "blocks made in a handler of exit");
    free(library_block(5000));
}

static void freed_at_exit(void) {
    make(&at_exit_set, 30);
    CHECK(atexit(at_exit) == 0);
    exit(0);
}

static void threads_at_exit(void) {
    for (size_t i = 0; i < THREADS; i++)
        begin(allocate_for_ever, NULL);
    while (atomic_load(&laps) < THREADS)
        usleep(1000);
    freed_at_exit();
}

static void *end_the_process(void *main_thread) {
    CHECK(pthread_join(*(pthread_t *)main_thread, NULL) == 0);
    freed_at_exit();
    return NULL;
}

static void main_thread_ends_first(void) {
    static pthread_t self;
    self = pthread_self();
    begin(end_the_process, &self);
    pthread_exit(NULL);
}

static void libraries_that_come_and_go(void) {
    static unsigned ended;
    const char *name = getenv("LIBRARY");
    CHECK(name);
    for (unsigned i = 1; i <= 8; i++) {
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            FAIL("dlopen: %s", dlerror());
        void *(*make_one)(size_t);
        unsigned **(*counter)(void);
        *(void **)&make_one = dlsym(library, "library_block");
        *(void **)&counter = dlsym(library, "library_counter");
        CHECK(make_one && counter);
        *counter() = &ended;
        void *kept = make_one(5000), *large = make_one(500000);
        CHECK(dlclose(library) == 0);
        if (ended != i)
            FAIL("the library's destructor has run %u times, not %u", ended, i);
        verify(kept, 5000, 55, "a block of a library that is gone");
        verify(large, 500000, 55, "a block of a library that is gone");
        free(kept);
        free(large);
    }
}

static void ends_well(pid_t child, const char *what) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("%s: status %x", what, (unsigned)status);
}

static void in_forked_children(void) {
    struct set set;
    make(&set, 40);
    for (size_t i = 0; i < THREADS; i++)
        begin(allocate_for_ever, NULL);
    for (size_t i = 0; i < 6; i++) {
        pid_t child = fork();
        if (child == 0) {
            resize(&set, 40, "a parent's blocks in its child");
            pid_t grandchild = fork();
            if (grandchild == 0) {
                drop(&set, 40, "blocks in a child's child");
                freed_at_exit();
            }
            ends_well(grandchild, "a child's child");
            struct set own;
            make(&own, 20);
            join(begin(drop_all, &own));
            drop(&set, 40, "a parent's blocks in its child");
            _exit(0);
        }
        check(&set, 40, "the parent's blocks");
        ends_well(child, "a forked child");
    }
    char *const arguments[] = {"true", NULL};
    pid_t child;
    CHECK(posix_spawnp(&child, "true", NULL, NULL, arguments, environ) == 0);
    ends_well(child, "a spawned child");
    drop(&set, 40, "the parent's blocks");
}

static void *live_briefly(void *argument) {
    struct set *set = argument;
    make(set, 20);
    struct set own;
    make(&own, 50);
    resize(&own, 50, "blocks of a brief thread");
    drop(&own, 50, "blocks of a brief thread");
    return NULL;
}

static void threads_that_end(void) {
    static struct set sets[12];
    pthread_t threads[12];
    for (size_t round = 0; round < 4; round++) {
        for (size_t i = 0; i < 12; i++)
            threads[i] = begin(live_briefly, &sets[i]);
        for (size_t i = 0; i < 12; i++)
            join(threads[i]);
        for (size_t i = 0; i < 12; i++)
            drop(&sets[i], 20, "blocks that brief threads have left");
    }
}

static const struct {
    const char *name;
    void (*run)(void);
} rows[] = {
    {"blocks from before all constructors", made_before_constructors},
    {"blocks that another thread frees", freed_by_another_thread},
    {"blocks in destructors of threads", freed_in_tls_destructors},
    {"blocks in handlers of exit", freed_at_exit},
    {"threads that allocate while the process ends", threads_at_exit},
    {"a main thread that ends first", main_thread_ends_first},
    {"libraries that come and go", libraries_that_come_and_go},
    {"blocks in forked children", in_forked_children},
    {"threads that end", threads_that_end},
};

int main(void) {
    size_t count = sizeof rows / sizeof *rows;
    for (size_t i = 0; i < count; i++) {
        if (getenv("PRESSURE"))
            push_out();
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            rows[i].run();
            exit(0);
        }
        ends_well(child, rows[i].name);
    }
    /* And once more here, where nothing was forked. */
    made_before_constructors();
    freed_by_another_thread();
    freed_in_tls_destructors();
    libraries_that_come_and_go();
    threads_that_end();
    pressure_end();
    printf("ok lifetimes: %zu rows\n", count);
    fflush(stdout);
    threads_at_exit();
    return 0;
}
