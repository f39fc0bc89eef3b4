/* FORKS forks while WRITERS threads write all over a working set of SIZE. Each child looks at a sample of
 * its pages (each fiftieth at all of them), writes to some and looks again; each tenth forks once more.
 *
 * A page carries its version in its first word, and is written from front to back. A fork copies it at some
 * instant: a child finds words of one version, and behind them words of the version before. What the parent
 * had finished before it forked is the least that it may find: anything older, and zeros, are wrong bytes. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define WORDS 512
#define ALIVE_MAX 4
#define SAMPLE 200

static uint64_t *memory;
static size_t pages, writers;
/* Small memory, which libc serves: the version that each page has reached. */
static _Atomic uint64_t *reached;
static atomic_bool stop;

static uint64_t word_of(size_t page, uint64_t version, size_t at) {
    return at == 0 ? version : pattern(page * 1000003 + version, at);
}

static void write_page(size_t page, uint64_t version) {
    volatile uint64_t *words = memory + page * WORDS;
    for (size_t at = 0; at < WORDS; at++)
        words[at] = word_of(page, version, at);
}

/* The version in front; fails unless the page is of it, or of it in front and of the one before behind. */
static uint64_t look(size_t page, uint64_t least, const char *who) {
    const volatile uint64_t *words = memory + page * WORDS;
    uint64_t version = words[0];
    size_t at = 0;
    while (at < WORDS && words[at] == word_of(page, version, at))
        at++;
    size_t front = at;
    while (at < WORDS && at > 0 && version > 0 && words[at] == word_of(page, version - 1, at))
        at++;
    if (at < WORDS || version < least)
        FAIL("%s: page %zu: version %" PRIu64 ", at least %" PRIu64 " wanted; words right up to %zu, "
             "then up to %zu of the version before",
             who, page, version, least, front, at);
    return version;
}

static void *writer(void *argument) {
    size_t self = (size_t)argument, own = pages / writers;
    uint64_t chance = self + 1;
    while (!atomic_load(&stop)) {
        chance = chance * 6364136223846793005u + 1442695040888963407u;
        size_t page = self * own + (size_t)(chance >> 33) % own;
        uint64_t version = atomic_load_explicit(&reached[page], memory_order_relaxed) + 1;
        write_page(page, version);
        atomic_store_explicit(&reached[page], version, memory_order_release);
    }
    return NULL;
}

static size_t sample(size_t number, size_t i) { return (i * 2654435761u + number * 97) % pages; }

static void child(size_t number, uint64_t *least) {
    bool all = number % 50 == 0;
    for (size_t i = 0; i < (all ? pages : SAMPLE); i++) {
        size_t page = all ? i : sample(number, i);
        uint64_t version = look(page, least[page], "child");
        if (i % 4 == 0) {
            /* Its own copy from now on, which nobody else writes. */
            least[page] = version + 1000000;
            write_page(page, least[page]);
            look(page, least[page], "child, after its own write");
        }
    }
    if (number % 10 == 0) {
        pid_t grandchild = fork();
        CHECK(grandchild >= 0);
        if (grandchild == 0) {
            for (size_t i = 0; i < SAMPLE; i++)
                look(sample(number, i), least[sample(number, i)], "grandchild");
            _exit(0);
        }
        /* Each twentieth leaves its child behind. */
        int status = 0;
        CHECK(number % 20 == 0 || waitpid(grandchild, &status, 0) == grandchild);
        if (status != 0)
            FAIL("the grandchild of child %zu ended with status %#x", number, status);
    }
    _exit(0);
}

static void await_one(void) {
    int status;
    pid_t ended = wait(&status);
    CHECK(ended > 0);
    if (status != 0)
        FAIL("child %d ended with status %#x", (int)ended, status);
}

static int by_time(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(void) {
    size_t bytes = working_set(), forks = setting("FORKS", "1000");
    writers = setting("WRITERS", "8");
    pages = bytes / 4096 / writers * writers;
    memory = need(bytes);
    reached = need(pages * sizeof *reached);
    uint64_t *least = need(pages * sizeof *least), *times = need(forks * sizeof *times);
    for (size_t page = 0; page < pages; page++) {
        write_page(page, 1);
        atomic_init(&reached[page], 1);
    }
    pthread_t threads[64];
    CHECK(writers <= sizeof threads / sizeof *threads);
    for (size_t i = 0; i < writers; i++)
        CHECK(pthread_create(&threads[i], NULL, writer, (void *)i) == 0);
    size_t alive = 0;
    for (size_t i = 0; i < forks; i++) {
        for (size_t page = 0; page < pages; page++)
            least[page] = atomic_load_explicit(&reached[page], memory_order_acquire);
        uint64_t before = now_ns();
        pid_t forked = fork();
        CHECK(forked >= 0);
        if (forked == 0)
            child(i, least);
        times[i] = now_ns() - before;
        if (++alive == ALIVE_MAX) {
            await_one();
            alive--;
        }
    }
    while (alive-- > 0)
        await_one();
    atomic_store(&stop, true);
    for (size_t i = 0; i < writers; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (size_t page = 0; page < pages; page++)
        if (look(page, reached[page], "parent") != reached[page])
            FAIL("parent: page %zu is newer than it was written", page);
    qsort(times, forks, sizeof *times, by_time);
    printf("ok fork_threads: %zu forks beside %zu writing threads, p50 %" PRIu64 " us, p99 %" PRIu64
           " us\n",
           forks, writers, times[forks / 2] / 1000, times[forks * 99 / 100] / 1000);
    return 0;
}
