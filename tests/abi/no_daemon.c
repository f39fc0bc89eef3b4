/* Where no daemon listens, the error names the socket and what to do. */
#include <stdio.h>
#include <string.h>
#include <tiermgr.h>

int main(void) {
    tiermgr_client *client = NULL;
    tiermgr_status status = tiermgr_connect(NULL, &client);
    const char *text = tiermgr_last_error();
    if (status != TIERMGR_E_NO_DAEMON || client != NULL || !strstr(text, "/nonexistent/socket") ||
        !strstr(text, "tiermgrd")) {
        fprintf(stderr, "got %s: %s\n", tiermgr_status_name(status), text);
        return 1;
    }
    return 0;
}
