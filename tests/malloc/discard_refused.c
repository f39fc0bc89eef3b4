/* A discard that is refused, for memory is locked, takes nothing that has left memory. */
#include "check.h"
#include <sys/mman.h>
#include <sys/resource.h>

#define PART ((size_t)16 << 20)

static void refused(unsigned char *part, const char *what) {
    if (madvise(part, PART, MADV_DONTNEED) == 0 || errno != EINVAL)
        FAIL("%s: a discard of locked memory was not refused as Linux does it (errno %d)", what, errno);
}

int main(void) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    unsigned char *block = need(2 * PART);
    fill(block, 2 * PART, 1);

    push_out();
    size_t absent = absent_pages(block, PART);
    if (getenv("EXPECT_MANAGED") && absent < PART / 4096 / 2)
        FAIL("only %zu pages have left memory", absent);
    CHECK(mlock2(block, PART, MLOCK_ONFAULT) == 0);
    refused(block, "locked when it is touched");
    CHECK(munlock(block, PART) == 0);
    verify(block, PART, 1, "after a discard that was refused");

    /* Linux gives up what lies before the locked page, if it is there. */
    push_out();
    unsigned char *page = block + PART / 2;
    CHECK(mlock(page, 4096) == 0);
    refused(block, "one locked page");
    CHECK(munlock(page, 4096) == 0);
    verify_part(block, PART / 2, 3 * PART / 2, 1, "behind a locked page");

    /* And what is not locked any more is given up. */
    CHECK(madvise(block, PART, MADV_DONTNEED) == 0);
    verify_zero(block, PART, "given up");
    verify_part(block, PART, PART, 1, "beside what was given up");
    pressure_end();
    printf("ok discard_refused: %zu pages were absent\n", absent);
    return 0;
}
