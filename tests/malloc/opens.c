/* Opens a library, and closes it, again and again, with allocations between. */
#include "check.h"
#include <dlfcn.h>

int main(int count, char **arguments) {
    CHECK(count == 2);
    for (int i = 0; i < 3; i++) {
        void *library = dlopen(arguments[1], RTLD_NOW | (i == 1 ? RTLD_GLOBAL : RTLD_LOCAL));
        if (!library) {
            puts(dlerror());
            return 0;
        }
        unsigned char *block = need(1 << 20);
        fill(block, 1 << 20, 1);
        CHECK(dlclose(library) == 0);
        verify(block, 1 << 20, 1, "after dlclose");
        free(block);
    }
    puts("ok opens");
    return 0;
}
