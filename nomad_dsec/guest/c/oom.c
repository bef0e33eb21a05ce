/* Whether an exec was killed for memory. The kernel tells how many processes of the sandbox it killed, never which, and a
 * SIGKILL by the OOM killer looks like any other. So: an exec that ended by a SIGKILL which was not ours, while more
 * kills were counted since it began than other execs account for, was killed for memory. It is decided once, here, so
 * that whoever asks, whenever and how often, gets the same answer. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "state.h"

#define SHELL_KILLED (128 + SIGKILL) /* what a shell makes of a SIGKILL of its last command */

/* Processes of the sandbox that the kernel killed for memory so far. */
static uint64_t oom_kills(void)
{
	static const char key[] = "oom_kill "; /* no other line of either version holds that, blank included */
	char text[1024];
	ssize_t n = options.oom_fd < 0 ? -1 : pread(options.oom_fd, text, sizeof text - 1, 0);
	if (n <= 0)
		return 0;
	text[n] = 0;
	const char *at = strstr(text, key);
	return at ? strtoull(at + sizeof key - 1, NULL, 10) : 0;
}

void oom_begin(struct exec *e) { e->oom_before = oom_kills(); }

void oom_judge(struct exec *e)
{
	bool killed = (WIFSIGNALED(e->status) && WTERMSIG(e->status) == SIGKILL) ||
	              (WIFEXITED(e->status) && WEXITSTATUS(e->status) == SHELL_KILLED);
	if (!killed || e->start_code || e->timed_out || e->host_signal == SIGKILL)
		return;
	uint64_t count = oom_kills(); /* the kernel counts before it kills */
	e->oom_killed = count > e->oom_before + e->oom_others;
	if (!e->oom_killed)
		return;
	for (struct exec *other = execs; other; other = other->next)
		if (!other->reaped && count > other->oom_before + other->oom_others)
			other->oom_others++; /* one that this exec accounts for */
}
