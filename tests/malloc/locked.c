/* mlock and mlockall on managed memory, parked and not. */
#include "check.h"
#include <sys/mman.h>
#include <sys/resource.h>

int main(void) {
    size_t bytes = working_set() / 8;
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    void *trial = mmap(NULL, 4 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(trial != MAP_FAILED);
    if (mlock2(trial, 4 * bytes, MLOCK_ONFAULT) != 0 && (errno == EPERM || errno == ENOMEM)) {
        printf("ok locked: skipped, this user may not lock %zu bytes\n", 4 * bytes);
        return 0;
    }
    CHECK(munmap(trial, 4 * bytes) == 0);
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
    free(block);
    free(beside);
    pressure_end();
    printf("ok locked: %zu bytes\n", bytes);
    return 0;
}
