/* A program that knows nothing of tiermgr: plain malloc, and every byte is checked.
 *
 *   workload fill MIB ROUNDS       fills, then ROUNDS times reads all in order and changes some
 *   workload hold MIB              fills, says "filled", waits for a line, checks, says "right"
 *   workload renew MIB             the same, and afterwards allocates anew and forks
 *   workload become MIB            fills, says "filled", waits for a line, becomes a program that sleeps
 *   workload orphan MIB            as hold; the first thread fills and ends, another says "filled" and goes on
 *   workload late MIB              as hold, all of it after the first thread has ended
 *   workload fork MIB              fills, forks; parent and child change and check their own copies
 *   workload forks MIB SECONDS     the same again and again; a child that is killed is no error
 *   workload pair MIB ROUNDS       forks once; both sides change and check their own, ROUNDS times
 *   workload blocks MIB SECONDS    allocates, checks and frees blocks of 64 KiB to 4 MiB
 *
 * Says what is wrong and exits with 1 where a byte is; 2 for a wrong command line. */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pages.h"

static void *allocate(size_t bytes)
{
    void *block = malloc(bytes);

    if (block == NULL) {
        fprintf(stderr, "malloc(%zu): %s\n", bytes, strerror(errno));
        exit(1);
    }
    return block;
}

static struct pages fill(size_t mib)
{
    return fill_pages(allocate(mib * MIB), mib * MIB);
}

static int run_fill(size_t mib, uint64_t rounds)
{
    struct pages pages = fill(mib);

    for (uint64_t round = 0; round < rounds; round++) {
        check(&pages, "in a round");
        change(&pages, round * pages.count, 8);
    }
    check(&pages, "at the end");
    free(pages.words);
    return 0;
}

/* Parent and child change their own copies and check them. */
static void fork_once(struct pages *pages, uint64_t seed, bool may_be_killed)
{
    pid_t child = fork();
    int status;

    if (child < 0) {
        perror("fork");
        exit(1);
    }
    if (child == 0) {
        change(pages, seed, 4);
        check(pages, "child");
        _exit(0);
    }
    change(pages, seed + 1, 4);
    check(pages, "parent");
    if (waitpid(child, &status, 0) != child) {
        perror("waitpid");
        exit(1);
    }
    if (status != 0 && !(may_be_killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) {
        fprintf(stderr, "the child ended with status %#x\n", (unsigned)status);
        exit(1);
    }
    check(pages, "parent after the child");
}

static int hold(struct pages pages, bool renews)
{
    char line[16];

    puts("filled");
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL)
        return 1;
    if (renews) {
        /* More than the first arena has: the daemon is asked for another. */
        size_t bytes = 1100 * MIB;
        uint64_t *more = allocate(bytes), last = bytes / PAGE - 1;

        write_page(more, 0, 1);
        write_page(more + last * PAGE_WORDS, last, 1);
        fork_once(&pages, 5, false);
        check_page(more, 0, 1, "a new block");
        check_page(more + last * PAGE_WORDS, last, 1, "the end of a new block");
        free(more);
    }
    check(&pages, "after the wait");
    change(&pages, 7, 4);
    check(&pages, "after changes");
    puts("right");
    return 0;
}

static int run_hold(size_t mib, bool renews)
{
    return hold(fill(mib), renews);
}

static int run_become(size_t mib)
{
    char line[16];

    fill(mib);
    puts("filled");
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) != NULL)
        execlp("sleep", "sleep", "60", (char *)NULL);
    return 1;
}

static pthread_t first_thread;
static struct pages first_filled;

static void *go_on(void *mib)
{
    if (pthread_join(first_thread, NULL) != 0)
        exit(1);
    if (first_filled.words == NULL)
        first_filled = fill((size_t)mib);
    exit(hold(first_filled, true));
}

/* Does not return. */
static int run_without_first_thread(size_t mib, bool fills)
{
    pthread_t other;

    if (fills)
        first_filled = fill(mib);
    first_thread = pthread_self();
    if (pthread_create(&other, NULL, go_on, (void *)mib) != 0)
        return 1;
    pthread_exit(NULL);
}

static int run_fork(size_t mib)
{
    struct pages pages = fill(mib);

    change(&pages, 1, 4);
    fork_once(&pages, 2, false);
    return 0;
}

static int run_forks(size_t mib, uint64_t seconds)
{
    struct pages pages = fill(mib);
    time_t end = time(NULL) + (time_t)seconds;

    for (uint64_t seed = 2; time(NULL) < end; seed += 2)
        fork_once(&pages, seed, true);
    return 0;
}

/* Parent and child each go on for ROUNDS, or until they are killed. */
static int run_pair(size_t mib, uint64_t rounds)
{
    struct pages pages = fill(mib);
    pid_t child = fork();
    int status;

    if (child < 0) {
        perror("fork");
        return 1;
    }
    for (uint64_t round = 0; round < rounds; round++) {
        change(&pages, round * 2 + (child == 0), 8);
        check(&pages, child == 0 ? "child of a pair" : "parent of a pair");
    }
    if (child == 0)
        _exit(0);
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}

static int run_blocks(size_t mib, uint64_t seconds)
{
    enum { SLOTS = 4096 };
    static struct { uint64_t *words; uint64_t pages, tag; } slots[SLOTS];
    uint64_t held = 0, limit = mib * MIB / PAGE, n = 0;
    time_t end = time(NULL) + (time_t)seconds;

    while (time(NULL) < end) {
        uint64_t random = mix(n++), at = random % SLOTS;

        if (slots[at].words != NULL) {
            for (uint64_t page = 0; page < slots[at].pages; page++)
                check_page(slots[at].words + page * PAGE_WORDS, page, slots[at].tag, "block");
            free(slots[at].words);
            held -= slots[at].pages;
            slots[at].words = NULL;
            continue;
        }
        slots[at].pages = 16UL << (random >> 32) % 7;
        if (held + slots[at].pages > limit)
            continue;
        slots[at].words = allocate(slots[at].pages * PAGE);
        slots[at].tag = random;
        held += slots[at].pages;
        for (uint64_t page = 0; page < slots[at].pages; page++)
            write_page(slots[at].words + page * PAGE_WORDS, page, random);
    }
    return 0;
}

int main(int argc, char **argv)
{
    size_t mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
    uint64_t more = argc > 3 ? strtoul(argv[3], NULL, 10) : 0;

    if (mib > 0 && strcmp(argv[1], "fill") == 0)
        return run_fill(mib, more);
    if (mib > 0 && strcmp(argv[1], "hold") == 0)
        return run_hold(mib, false);
    if (mib > 0 && strcmp(argv[1], "renew") == 0)
        return run_hold(mib, true);
    if (mib > 0 && strcmp(argv[1], "become") == 0)
        return run_become(mib);
    if (mib > 0 && strcmp(argv[1], "orphan") == 0)
        return run_without_first_thread(mib, true);
    if (mib > 0 && strcmp(argv[1], "late") == 0)
        return run_without_first_thread(mib, false);
    if (mib > 0 && strcmp(argv[1], "fork") == 0)
        return run_fork(mib);
    if (mib > 0 && strcmp(argv[1], "forks") == 0)
        return run_forks(mib, more);
    if (mib > 0 && strcmp(argv[1], "pair") == 0)
        return run_pair(mib, more);
    if (mib > 0 && strcmp(argv[1], "blocks") == 0)
        return run_blocks(mib, more);
    fprintf(stderr, "usage: %s fill|hold|renew|become|orphan|late|fork|forks|pair|blocks MIB [ROUNDS|SECONDS]\n", argv[0]);
    return 2;
}
