/* Its constructor runs before that of a library in LD_PRELOAD: what it has called around a fork is called inside
 * of what that one has called. */
#include <pthread.h>
#include <stdlib.h>

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
    if (pthread_atfork(prepare, parent, child) != 0)
        abort();
}
