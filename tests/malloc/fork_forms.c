/* New processes by other ways than fork(), and by fork() in odd places. HOW names one. Parent and child write
 * to pages that the other reads, and each looks at all of its own: every page is of the version that it last
 * wrote there itself, or else of the one before the fork. */
#include "check.h"
#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define PAGE 4096
#define WORDS (PAGE / 8)

extern char **environ;
static uint64_t *memory;
static size_t pages;
/* Small memory, which libc serves. */
static unsigned char *version;

static void write_page(size_t page, unsigned char now) {
    fill(memory + page * WORDS, PAGE, page * 251 + now);
    version[page] = now;
}

static void look_at_all(const char *who) {
    for (size_t page = 0; page < pages; page++)
        verify(memory + page * WORDS, PAGE, page * 251 + version[page], who);
}

static void begin(void) {
    size_t bytes = working_set();
    pages = bytes / PAGE;
    memory = need(bytes);
    version = need(pages);
    for (size_t page = 0; page < pages; page++)
        write_page(page, 1);
}

/* One side after the split: `own` is its number. */
static void live(unsigned char own, const char *who) {
    for (size_t page = own; page < pages; page += 3)
        write_page(page, own);
    look_at_all(who);
    /* Large blocks of its own: what is new reads as what was written. */
    size_t bytes = 24 << 20;
    uint64_t *block = need(bytes);
    fill(block, bytes, own);
    for (size_t page = own + 1; page < pages; page += 5)
        write_page(page, own);
    verify(block, bytes, own, who);
    free(block);
    look_at_all(who);
}

static void await(pid_t child, const char *what) {
    int status;
    CHECK(waitpid(child, &status, __WALL) == child);
    if (status != 0)
        FAIL("%s ended with status %#x", what, status);
}

static void both_live(pid_t child, const char *how) {
    CHECK(child >= 0);
    if (child == 0) {
        live(2, how);
        _exit(0);
    }
    live(3, "the parent");
    await(child, how);
    look_at_all("the parent at the end");
}

static pid_t raw_clone(unsigned long flags) {
    return (pid_t)syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
}

static pid_t clone_by_instruction(void) {
#ifdef __x86_64__
    long result;
    register long r10 asm("r10") = 0, r8 asm("r8") = 0;
    asm volatile("syscall"
                 : "=a"(result)
                 : "0"(SYS_clone), "D"((long)SIGCHLD), "S"(0L), "d"(0L), "r"(r10), "r"(r8)
                 : "rcx", "r11", "memory");
    return (pid_t)result;
#else
    return raw_clone(0);
#endif
}

static pid_t clone3_fork(uint64_t flags) {
    struct clone_args args = {.flags = flags, .exit_signal = SIGCHLD};
    return (pid_t)syscall(SYS_clone3, &args, sizeof args);
}

/* Raw children of raw children. */
static void nested(pid_t (*make)(void), int depth) {
    pid_t child = make();
    CHECK(child >= 0);
    if (child == 0) {
        live((unsigned char)(depth % 3 + 2), "a nested child");
        if (depth > 1)
            nested(make, depth - 1);
        look_at_all("a nested child at its end");
        _exit(0);
    }
    live(5, "the parent of a nested child");
    await(child, "a nested child");
}

static pid_t raw(void) { return raw_clone(0); }
static pid_t alternating(void) {
    static int turn;
    return turn++ % 2 ? fork() : raw_clone(0);
}

static void spawned(void) {
    char *arguments[] = {"true", NULL};
    for (volatile int i = 0; i < 100; i++) {
        posix_spawn_file_actions_t actions;
        CHECK(posix_spawn_file_actions_init(&actions) == 0);
        CHECK(posix_spawn_file_actions_addclosefrom_np(&actions, 3) == 0);
        CHECK(posix_spawn_file_actions_adddup2(&actions, 0, 500) == 0);
        pid_t child;
        CHECK(posix_spawn(&child, "/bin/true", &actions, NULL, arguments, environ) == 0);
        CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
        write_page((size_t)i * 37 % pages, 4);
        await(child, "a spawned program");
        child = vfork();
        if (child == 0) {
            execv("/bin/true", arguments);
            _exit(126);
        }
        await(child, "a program after vfork");
    }
    look_at_all("after spawned programs");
    live(5, "after spawned programs");
}

static int sharer(void *unused) {
    (void)unused;
    for (size_t page = 0; page < pages; page += 2)
        write_page(page, 6);
    look_at_all("a process that shares the memory");
    return 0;
}

static void shared_memory(void) {
    size_t stack = 1 << 20;
    unsigned char *base = need(stack);
    for (int flags = 0; flags < 2; flags++) {
        pid_t child = clone(sharer, base + stack, CLONE_VM | (flags ? CLONE_FILES : 0) | SIGCHLD, NULL);
        CHECK(child > 0);
        await(child, "a process that shares the memory");
        look_at_all("after a process that shared the memory");
        live(3, "after a process that shared the memory");
    }
    free(base);
}

static void new_pid_namespace(void) {
    if (unshare(CLONE_NEWPID) != 0) {
        SKIPPED("unshare(CLONE_NEWPID): %s", strerror(errno));
        exit(0);
    }
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(getpid() == 1);
        live(2, "the first of a namespace");
        both_live(fork(), "a child in a namespace");
        _exit(0);
    }
    live(3, "the parent");
    await(child, "the first of a namespace");
    look_at_all("the parent at the end");
}

static void daemonise(void) {
    int done[2];
    CHECK(pipe(done) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* Twice, as daemons do; and it closes what it does not know. */
        CHECK(daemon(0, 1) == 0);
        pid_t again = fork();
        CHECK(again >= 0);
        if (again != 0)
            _exit(0);
        for (int fd = 3; fd < 1100; fd++)
            if (fd != done[1])
                close(fd);
        live(2, "a daemon");
        CHECK(write(done[1], "ok", 2) == 2);
        _exit(0);
    }
    close(done[1]);
    live(3, "the parent");
    await(child, "the first child");
    char said[3] = "";
    CHECK(read(done[0], said, 2) == 2 && strcmp(said, "ok") == 0);
    look_at_all("the parent at the end");
}

static void *forking_thread(void *unused) {
    (void)unused;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        live(2, "a child of a thread");
        _exit(0);
    }
    await(child, "a child of a thread");
    return NULL;
}

static void from_threads(void) {
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, forking_thread, NULL) == 0);
    for (size_t i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    look_at_all("the parent at the end");
}

static volatile sig_atomic_t signals_left = 12;
static _Atomic int forked;

static void on_alarm(int number) {
    (void)number;
    if (signals_left-- <= 0)
        return;
    int before = errno;
    pid_t child = fork();
    if (child < 0)
        _exit(3);
    if (child == 0) {
        /* Only what may be done in a handler; the pages are all as they were. */
        for (size_t page = 0; page < pages; page += 61)
            verify(memory + page * WORDS, PAGE, page * 251 + 1, "a child of a handler");
        _exit(0);
    }
    atomic_fetch_add(&forked, 1);
    errno = before;
}

static void from_a_handler(void) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    struct itimerspec often = {{0, 20 * 1000 * 1000}, {0, 20 * 1000 * 1000}};
    CHECK(timer_settime(timer, 0, &often, NULL) == 0);
    /* In and out of the allocator. */
    while (signals_left > 0) {
        unsigned char *block = need(8 << 20);
        fill(block, 1 << 20, 9);
        verify(block, 1 << 20, 9, "a block beside forks of a handler");
        free(block);
    }
    CHECK(timer_delete(timer) == 0);
    int count = atomic_load(&forked);
    for (int i = 0; i < count; i++) {
        int status;
        pid_t ended;
        do
            ended = wait(&status);
        while (ended < 0 && errno == EINTR);
        CHECK(ended > 0);
        if (status != 0)
            FAIL("a child of a handler ended with status %#x", status);
    }
    look_at_all("the parent at the end");
    if (count != 12)
        FAIL("%d forks from a handler", count);
}

/* Children that nobody tells of, one after the other: when they have ended, what they had is given back. */
static void many_raw(void) {
    for (int i = 0; i < 6; i++) {
        pid_t child = raw_clone(0);
        CHECK(child >= 0);
        if (child == 0) {
            for (size_t page = 0; page < pages; page += 2)
                write_page(page, 2);
            look_at_all("one of many");
            _exit(0);
        }
        await(child, "one of many");
    }
    puts("ended");
    fflush(stdout);
    if (getenv("HOLD"))
        CHECK(getchar() != EOF);
    look_at_all("the parent of many");
}

static void by_raw_clone(void) { both_live(raw_clone(0), "a child of a raw clone"); }
static void by_instruction(void) { both_live(clone_by_instruction(), "a child of an instruction"); }
static void by_clone3(void) { both_live(clone3_fork(0), "a child of clone3"); }
static void into_namespace(void) { both_live(raw_clone(CLONE_NEWPID), "a raw child in a new namespace"); }
static void nested_forks(void) { nested(fork, 3); }
static void nested_raw(void) { nested(raw, 3); }
static void nested_both(void) { nested(alternating, 4); }

static const struct {
    const char *name;
    void (*run)(void);
} forms[] = {
    {"raw", by_raw_clone},       {"instruction", by_instruction},
    {"clone3", by_clone3},       {"raw-namespace", into_namespace},
    {"spawn", spawned},          {"shared", shared_memory},
    {"daemon", daemonise},       {"unshared", new_pid_namespace},
    {"threads", from_threads},   {"handler", from_a_handler},
    {"nested", nested_forks},    {"nested-raw", nested_raw},
    {"many-raw", many_raw},      {"nested-both", nested_both},
};

int main(void) {
    const char *how = getenv("HOW");
    CHECK(how);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (strcmp(how, forms[i].name) == 0) {
            begin();
            forms[i].run();
            printf("ok fork_forms: %s\n", how);
            return 0;
        }
    FAIL("HOW=%s is unknown", how);
}
