/* What it has called around a fork is called inside of what a library in LD_PRELOAD has called, or, with
 * FORK_OUTSIDE, outside of it. */
#include "atfork_inside.h"
#include <pthread.h>

enum { PREPARE, PARENT, CHILD };

void (*fork_hook)(int when);

static void call(int when) {
    if (fork_hook)
        fork_hook(when);
}

static void prepare(void) { call(PREPARE); }
static void parent(void) { call(PARENT); }
static void child(void) { call(CHILD); }

__attribute__((constructor)) static void begin(void) {
    if (!getenv("FORK_OUTSIDE"))
        atfork_inside(prepare, parent, child);
    else if (pthread_atfork(prepare, parent, child) != 0)
        abort();
}
