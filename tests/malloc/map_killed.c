/* A program maps, unmaps, discards and grows memory while the daemon is killed and comes back, KILLS times, or
 * with ALONE is gone for good before anything was parked. DAEMON names the keeper and the daemon. Every byte is
 * looked at, and what is refused was not done. */
#include "check.h"
#include <signal.h>
#include <sys/mman.h>

enum { COUNT = 8 };
#define PAGE ((size_t)4096)
#define PRIVATE (MAP_PRIVATE | MAP_ANONYMOUS)
#define ACCESS (PROT_READ | PROT_WRITE)

static unsigned char *own[COUNT];
static size_t bytes;
static uint64_t seeds[COUNT], refusals;

static void change(size_t i, uint64_t round) {
    size_t part = bytes / 2 + 3 * PAGE;
    verify(own[i], bytes, seeds[i], "a mapping");
    switch (round % 4) {
    case 0:
        CHECK(munmap(own[i], bytes) == 0 && !can_read(own[i]));
        own[i] = mmap(NULL, bytes, ACCESS, PRIVATE, -1, 0);
        CHECK(own[i] != MAP_FAILED);
        verify_zero(own[i], bytes, "a new mapping");
        break;
    case 1:
        if (madvise(own[i], part, MADV_DONTNEED) == 0) {
            verify_zero(own[i], part, "discarded");
        } else {
            CHECK(errno == EAGAIN);
            verify(own[i], bytes, seeds[i], "not discarded");
            refusals++;
        }
        break;
    case 2: {
        unsigned char *to = mremap(own[i], bytes, bytes + part, MREMAP_MAYMOVE);
        CHECK(to != MAP_FAILED);
        verify(to, bytes, seeds[i], "grown");
        verify_zero(to + bytes, part & ~(PAGE - 1), "grown");
        own[i] = mremap(to, bytes + part, bytes, 0);
        CHECK(own[i] == to);
        break;
    }
    default:
        CHECK(munmap(own[i] + PAGE, part) == 0);
        verify_part(own[i], 0, PAGE, seeds[i], "before a hole");
        if (mmap(own[i] + PAGE, part, ACCESS, PRIVATE | MAP_FIXED, -1, 0) == MAP_FAILED) {
            CHECK(errno == EAGAIN && !can_read(own[i] + PAGE));
            refusals++;
            CHECK(munmap(own[i], bytes) == 0);
            own[i] = mmap(NULL, bytes, ACCESS, PRIVATE, -1, 0);
            CHECK(own[i] != MAP_FAILED);
            verify_zero(own[i], bytes, "after a hole");
        } else {
            verify_zero(own[i] + PAGE, part & ~(PAGE - 1), "in a hole");
        }
    }
    seeds[i] += 1000;
    fill(own[i], bytes, seeds[i]);
}

/* The keeper's child is the daemon. */
static pid_t serving(pid_t keeper) {
    char path[64];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)keeper, (int)keeper);
    FILE *file = fopen(path, "r");
    CHECK(file);
    if (fscanf(file, "%d", &pid) != 1)
        pid = 0;
    fclose(file);
    return (pid_t)pid;
}

int main(void) {
    const char *list = getenv("DAEMON");
    bool alone = getenv("ALONE");
    size_t kills = setting("KILLS", "3"), rounds = alone ? 200 : 40;
    CHECK(list);
    pid_t keeper = (pid_t)atoi(list);
    bytes = alone ? 512 << 10 : working_set() / COUNT & ~(PAGE - 1);
    for (size_t i = 0; i < COUNT; i++) {
        own[i] = mmap(NULL, bytes, ACCESS, PRIVATE, -1, 0);
        CHECK(own[i] != MAP_FAILED && is_managed(own[i]));
        fill(own[i], bytes, seeds[i] = i);
    }
    if (alone) {
        pid_t daemon = serving(keeper);
        CHECK(kill(keeper, SIGKILL) == 0 && kill(daemon, SIGKILL) == 0);
        usleep(200000);
        kills = 1;
    }
    uint64_t began = now_ns();
    for (size_t turn = 0; turn < kills; turn++) {
        pid_t daemon = alone ? 0 : serving(keeper);
        if (daemon)
            CHECK(kill(daemon, SIGKILL) == 0);
        for (uint64_t round = 0; round < rounds; round++)
            change(round % COUNT, round / COUNT + round);
    }
    for (size_t i = 0; i < COUNT; i++) {
        verify(own[i], bytes, seeds[i], "at the end");
        CHECK(munmap(own[i], bytes) == 0);
    }
    CHECK(now_ns() - began < 90 * (uint64_t)1000000000);
    CHECK(!alone || refusals > 0);
    printf("ok map_killed: %zu kills, %" PRIu64 " refusals\n", kills, refusals);
    return 0;
}
