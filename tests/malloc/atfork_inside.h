/* For a library that is linked to a program, in its constructor: libc's own function, and not the allocator's of the
 * same name, has handlers called around a fork. They run inside of the allocator's. */
#ifndef TIERMGR_TESTS_ATFORK_INSIDE_H
#define TIERMGR_TESTS_ATFORK_INSIDE_H

#include <dlfcn.h>
#include <stdlib.h>

extern void *__dso_handle;

static inline void atfork_inside(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    int (*install)(void (*)(void), void (*)(void), void (*)(void), void *);
    if (!libc)
        abort();
    *(void **)&install = dlsym(libc, "__register_atfork");
    if (!install || install(prepare, parent, child, &__dso_handle) != 0)
        abort();
}

#endif
