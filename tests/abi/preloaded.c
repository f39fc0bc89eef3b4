/* A program with both libraries: what malloc gave it is managed by libtiermgr_preload, and it speaks of it
 * through libtiermgr. */
#include "../malloc/check.h"
#include <sys/wait.h>
#include <tiermgr.h>

/* The call gives this. */
#define GIVES(wanted, call)                                                                        \
    do {                                                                                           \
        tiermgr_status got = (call);                                                               \
        if (got != (wanted))                                                                       \
            FAIL("%s gave %s, wanted %s: %s", #call, tiermgr_status_name(got),                     \
                 tiermgr_status_name(wanted), tiermgr_last_error());                               \
    } while (0)
#define OK(call) GIVES(TIERMGR_OK, call)

static tiermgr_client *client;

static tiermgr_residency where(const void *memory, size_t bytes) {
    tiermgr_residency found = {.size = sizeof found};
    OK(tiermgr_residency_query(client, memory, bytes, &found));
    CHECK(found.resident_bytes + found.parked_bytes + found.absent_bytes + found.unarmed_bytes +
              found.poisoned_bytes == bytes);
    return found;
}

int main(void) {
    size_t bytes = working_set() / 16;
    void *own;
    uint64_t lease, other, lost;
    unsigned char *block = aligned_alloc(4096, bytes);
    CHECK(block);
    fill(block, bytes, 1);
    OK(tiermgr_connect(NULL, &client));
    push_out();
    CHECK(where(block, bytes).parked_bytes > 0);

    OK(tiermgr_prefetch(client, block, bytes / 4));
    OK(tiermgr_pin(client, block, bytes, &lease));
    push_out();
    CHECK(where(block, bytes).parked_bytes == 0 && absent_pages(block, bytes) == 0);
    verify(block, bytes, 1, "pinned");

    /* Leases of both clients at once: each ends its own. */
    OK(tiermgr_alloc(client, 1 << 20, 0, &own));
    OK(tiermgr_pin(client, own, 1 << 20, &other));
    CHECK(lease != other);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        verify(block, bytes, 1, "in the child");
        OK(tiermgr_pin(client, block, 1 << 20, &lost));
        OK(tiermgr_unpin(client, lost));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(tiermgr_unpin(client, other));
    GIVES(TIERMGR_E_INVALID_ARGUMENT, tiermgr_unpin(client, other));
    OK(tiermgr_unpin(client, lease));
    GIVES(TIERMGR_E_INVALID_ARGUMENT, tiermgr_unpin(client, lease));

    OK(tiermgr_advise(client, block, bytes, TIERMGR_ADVICE_COLD));
    push_out();
    CHECK(where(block, bytes).parked_bytes > 0);
    OK(tiermgr_advise(client, block, bytes / 2, TIERMGR_ADVICE_DONTNEED));
    verify_zero(block, bytes / 2, "dropped");
    verify_part(block, bytes / 2, bytes / 2, 1, "beside what was dropped");
    GIVES(TIERMGR_E_INVALID_ARGUMENT, tiermgr_advise(client, block, bytes, (tiermgr_advice)99));
    GIVES(TIERMGR_E_NOT_MANAGED, tiermgr_pin(client, block, (size_t)1 << 40, &lost));
    static char foreign[65536] __attribute__((aligned(65536)));
    GIVES(TIERMGR_E_NOT_MANAGED, tiermgr_pin(client, foreign, 65536, &lost));
    /* It may be spoken of, but whoever gave it takes it back. */
    GIVES(TIERMGR_E_INVALID_ARGUMENT, tiermgr_free(client, block));
    OK(tiermgr_disconnect(client));
    pressure_end();
    free(block);
    printf("ok preloaded: %zu bytes\n", bytes);
    return 0;
}
