/* mlock and mlockall on managed memory, parked and not. With FUTURE in the environment the program locks
 * all its memory before it has any that is managed. */
#include "check.h"
#include <sys/mman.h>
#include <sys/resource.h>

static size_t resident_bytes(void) {
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm);
    size_t pages;
    CHECK(fscanf(statm, "%*u %zu", &pages) == 1);
    fclose(statm);
    return pages * 4096;
}

/* What is locked stays in memory, what was never touched takes none, and what is not locked any more can
 * leave it although all of this was made under MCL_FUTURE. */
static void future(size_t bytes) {
    size_t before = resident_bytes();
    CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    size_t with_libraries = resident_bytes();
    unsigned char *block = need(bytes);
    if (resident_bytes() - with_libraries > bytes / 2)
        FAIL("malloc(%zu) took %zu bytes of memory (%zu before mlockall)", bytes,
             resident_bytes() - with_libraries, before);
    fill(block, bytes, 1);
    pressure_block = need(working_set());
    CHECK(munlock(pressure_block, working_set()) == 0);
    push_out();
    verify(block, bytes, 1, "locked from the start");
    if (absent_pages(block, bytes) != 0)
        FAIL("%zu pages of locked memory are not in memory", absent_pages(block, bytes));
    pressure_end();

    CHECK(munlockall() == 0);
    push_out();
    if (absent_pages(block, bytes) == 0)
        FAIL("nothing left memory after munlockall");
    verify(block, bytes, 1, "unlocked");
    pressure_end();
    free(block);
}

int main(void) {
    size_t bytes = working_set() / 8;
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    void *trial = mmap(NULL, 4 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(trial != MAP_FAILED);
    if (mlock2(trial, 4 * bytes, MLOCK_ONFAULT) != 0 && (errno == EPERM || errno == ENOMEM)) {
        SKIPPED("this user may not lock %zu bytes", 4 * bytes);
        return 0;
    }
    CHECK(munmap(trial, 4 * bytes) == 0);
    if (getenv("FUTURE")) {
        future(bytes);
        printf("ok locked: %zu bytes, from the start\n", bytes);
        return 0;
    }
    unsigned char *block = aligned_alloc(4096, bytes);
    CHECK(block);
    fill(block, bytes, 1);
    push_out();
    pressure_end();
    CHECK(mlock(block, bytes) == 0);
    verify(block, bytes, 1, "locked while parked");
    unsigned char *beside = need(bytes);
    fill(beside, bytes, 2);
    push_out();
    verify(block, bytes, 1, "locked under pressure");
    verify(beside, bytes, 2, "beside locked memory");
    pressure_end();
    CHECK(munlock(block, bytes) == 0);
    push_out();
    verify(block, bytes, 1, "unlocked again");
    pressure_end();

    /* What exists now, not what will: an arena is as large as the address space allows. */
    CHECK(mlockall(MCL_CURRENT | MCL_ONFAULT) == 0);
    fill(block, bytes, 3);
    verify(beside, bytes, 2, "after mlockall");
    verify(block, bytes, 3, "after mlockall");
    CHECK(munlockall() == 0);
    push_out();
    verify(block, bytes, 3, "after munlockall");
    verify(beside, bytes, 2, "after munlockall");
    pressure_end();

    /* Memory that is not managed is brought in, all of it, with the tables of the library; of managed memory what is
     * touched, and it stays. */
    unsigned char *native = mmap(NULL, 16 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(native != MAP_FAILED && absent_pages(native, 16 * 4096) == 16);
    unsigned char *untouched = need(bytes);
    size_t resident = resident_bytes();
    CHECK(mlockall(MCL_CURRENT) == 0);
    CHECK(absent_pages(native, 16 * 4096) == 0);
    if (resident_bytes() - resident > 3 * bytes + (64 << 20))
        FAIL("mlockall took %zu bytes of memory", resident_bytes() - resident);
    verify(block, bytes, 3, "locked with everything");
    unsigned char *pressure = need(4 * bytes);
    CHECK(munlock(pressure, 4 * bytes) == 0);
    fill(pressure, 4 * bytes, 4);
    if (absent_pages(block, bytes) != 0)
        FAIL("%zu pages of locked memory are not in memory", absent_pages(block, bytes));
    verify(block, bytes, 3, "locked with everything");
    verify(beside, bytes, 2, "locked with everything");
    verify(pressure, 4 * bytes, 4, "beside everything that is locked");
    CHECK(munlockall() == 0);
    free(pressure);
    free(untouched);
    free(block);
    free(beside);
    pressure_end();
    printf("ok locked: %zu bytes\n", bytes);
    return 0;
}
