/* One call from the start of its program to the death of its tree: pipes, limits of time and output. */
#include "call.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHUNK (64u * 1024)
#define CPU_CHECK_MIN_US 4000
#define CPU_CHECK_MAX_US 250000

struct running {
	struct call *call;
	const struct call_meters *meters;
	struct call_reply *reply;
	int control, zygote, pidfd; /* pidfd -1: the zygote tells when the program has ended */
	int out_fd, err_fd;
	struct bytes *out, *err;
	pid_t pid;
	uint64_t began_us, cpu_before_us, next_cpu_check_us;
	bool ended;
};

static uint64_t read_number(int fd, const char *label)
{
	char text[4096];
	ssize_t n = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
	if (n <= 0)
		return 0;
	text[n] = 0;
	const char *at = text;
	if (label) {
		at = strstr(text, label);
		if (!at)
			return 0;
		at += strlen(label);
	}
	return strtoull(at, NULL, 10);
}

/* cpu.stat of cgroup2 has microseconds under a name, v1's cpuacct.usage is a number of nanoseconds. */
uint64_t meter_cpu_us(const struct call_meters *m)
{
	uint64_t us = read_number(m->cpu_fd, "usage_usec ");
	return us ? us : read_number(m->cpu_fd, NULL) / 1000;
}

uint64_t meter_oom_kills(const struct call_meters *m) { return read_number(m->oom_fd, "oom_kill "); }
uint64_t meter_memory(const struct call_meters *m) { return read_number(m->memory_fd, NULL); }

static bool open_stdin(struct call *c, int *fd, bool *ours)
{
	int pair[2];
	*ours = false;
	*fd = 0; /* /dev/null */
	if (c->r.flags & CALL_STDIN_FD) {
		*fd = c->stdin_fd;
		return true;
	}
	if (c->r.stdin_bytes == 0)
		return true;
	if (pipe2(pair, O_CLOEXEC))
		return false;
	ssize_t n = write(pair[1], c->stdin_at, c->r.stdin_bytes); /* at most a pipe's capacity: the node sees to it */
	close(pair[1]);
	*fd = pair[0];
	*ours = true;
	return n == (ssize_t)c->r.stdin_bytes && fchown(pair[0], CALL_USER, CALL_USER) == 0;
}

/* Its owner is the program's user, so that it can open /dev/stdout as a path. */
static bool open_pipe(int pair[2])
{
	if (pipe2(pair, O_CLOEXEC))
		return false;
	return fcntl(pair[0], F_SETFL, O_NONBLOCK) == 0 && fchown(pair[1], CALL_USER, CALL_USER) == 0;
}

/* False at end of file. At most limit bytes are kept; over is set by the first beyond. */
static bool collect(int fd, struct bytes *to, uint64_t limit, bool *over)
{
	static uint8_t rest[CHUNK];
	bool full = to->size >= limit;
	size_t want = full || limit - to->size > CHUNK ? CHUNK : (size_t)(limit - to->size);
	uint8_t *at = full ? rest : bytes_room(to, want);
	if (!at) {
		at = rest;
		full = true;
	}
	ssize_t n = read(fd, at, want);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR;
	if (n > 0 && full)
		*over = true;
	else if (n > 0)
		to->size += (size_t)n;
	return n > 0;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void take(struct running *g, int *fd, struct bytes *to, uint32_t flag)
{
	bool over = false;
	if (!collect(*fd, to, g->call->r.output_bytes, &over))
		close_fd(fd);
	if (over)
		g->reply->flags |= flag;
}

static void drain(struct running *g, int *fd, struct bytes *to, uint32_t flag)
{
	while (*fd >= 0 && !(g->reply->flags & flag)) {
		struct pollfd p = {.fd = *fd, .events = POLLIN};
		if (poll(&p, 1, 0) != 1)
			break;
		take(g, fd, to, flag);
	}
	close_fd(fd);
}

static void not_started(struct call_reply *reply, uint32_t step, int error)
{
	reply->flags |= CALL_NOT_STARTED;
	reply->step = step;
	reply->error = (uint32_t)error;
}

static void zygote_ended(struct running *g)
{
	struct zygote_report r;
	g->ended = true;
	if (!zygote_report(g->zygote, &r)) {
		g->reply->flags |= CALL_BROKEN;
		not_started(g->reply, STEP_ZYGOTE, EPIPE);
		return;
	}
	g->reply->status = r.status;
	g->reply->maxrss_kib = r.maxrss_kib;
	g->reply->major_faults = r.major_faults;
	if (r.step)
		not_started(g->reply, r.step, (int)r.error);
}

static void program_ended(struct running *g)
{
	int status;
	struct rusage use = {0};
	g->ended = true;
	if (wait4(g->pid, &status, __WALL, &use) != g->pid) {
		g->reply->flags |= CALL_BROKEN;
		return;
	}
	g->reply->status = (uint32_t)status;
	g->reply->maxrss_kib = (uint64_t)use.ru_maxrss;
	g->reply->major_faults = (uint64_t)use.ru_majflt;
}

/* How long until the limit could be passed by a few cores at once. */
static uint64_t cpu_wait(uint64_t left_us)
{
	uint64_t wait = left_us / 4;
	if (wait < CPU_CHECK_MIN_US)
		return CPU_CHECK_MIN_US;
	return wait < CPU_CHECK_MAX_US ? wait : CPU_CHECK_MAX_US;
}

static void check_cpu(struct running *g, uint64_t now)
{
	if (now < g->next_cpu_check_us)
		return;
	uint64_t used = meter_cpu_us(g->meters) - g->cpu_before_us, limit = g->call->r.cpu_us;
	if (used > limit) {
		g->reply->flags |= CALL_CPU_OVER;
		return;
	}
	g->next_cpu_check_us = now + cpu_wait(limit - used);
}

static bool is_over(const struct running *g)
{
	return g->reply->flags & (CALL_WALL_OVER | CALL_CPU_OVER | CALL_OUT_OVER | CALL_ERR_OVER | CALL_CANCELLED);
}

/* During a call the node sends nothing but CANCEL; the end of the socket is the end of the lane. */
static void control_ready(struct running *g)
{
	struct call_request r;
	ssize_t n = recv(g->control, &r, sizeof r, MSG_DONTWAIT);
	if (n == 0 || (n < 0 && errno != EAGAIN))
		_exit(0);
	if (n == (ssize_t)sizeof r && r.type == CALL_CANCEL && r.id == g->call->r.id)
		g->reply->flags |= CALL_CANCELLED;
}

static void watch(struct running *g)
{
	uint64_t deadline = g->began_us + g->call->r.wall_us;
	while (!g->ended && !is_over(g)) {
		struct pollfd p[4] = {
		    {.fd = g->pidfd >= 0 ? g->pidfd : g->zygote, .events = POLLIN},
		    {.fd = g->out_fd, .events = POLLIN},
		    {.fd = g->err_fd, .events = POLLIN},
		    {.fd = g->control, .events = POLLIN},
		};
		uint64_t now = call_now_us(), next = g->next_cpu_check_us < deadline ? g->next_cpu_check_us : deadline;
		int n = poll(p, 4, next > now ? (int)((next - now + 999) / 1000) : 0);
		now = call_now_us();
		if (n > 0 && p[1].revents)
			take(g, &g->out_fd, g->out, CALL_OUT_OVER);
		if (n > 0 && p[2].revents)
			take(g, &g->err_fd, g->err, CALL_ERR_OVER);
		if (n > 0 && p[3].revents)
			control_ready(g);
		if (n > 0 && p[0].revents) {
			if (g->pidfd >= 0)
				program_ended(g);
			else
				zygote_ended(g);
			return;
		}
		if (now >= deadline)
			g->reply->flags |= CALL_WALL_OVER;
		check_cpu(g, now);
	}
}

static bool start(struct running *g, const struct call_start *s)
{
	*s->report = (struct call_report){0};
	g->cpu_before_us = meter_cpu_us(g->meters);
	g->began_us = call_now_us();
	g->next_cpu_check_us = g->began_us + cpu_wait(g->call->r.cpu_us);
	if (g->call->r.flags & CALL_ZYGOTE) {
		if (zygote_ask(g->zygote, g->call, s->slot, s->in, s->out, s->err))
			return true;
		g->reply->flags |= CALL_BROKEN;
		not_started(g->reply, STEP_ZYGOTE, errno);
		return false;
	}
	g->pid = call_fork(s, &g->pidfd);
	if (g->pid < 0)
		not_started(g->reply, STEP_FORK, errno);
	return g->pid >= 0;
}

static void finish(struct running *g, const struct call_start *s)
{
	watch(g);
	if (g->reply->flags & (CALL_WALL_OVER | CALL_CPU_OVER))
		g->reply->held_bytes = meter_memory(g->meters);
	kill(s->slot->reaper, SIGKILL); /* and with it everything in its pid namespace */
	if (!g->ended && g->pidfd >= 0)
		program_ended(g);
	else if (!g->ended)
		zygote_ended(g);
	g->reply->wall_us = call_now_us() - g->began_us;
	close_fd(&g->pidfd);
	if (s->report->step)
		not_started(g->reply, s->report->step, (int)s->report->error);
}

static struct call_report *shared_report(void)
{
	static struct call_report *report;
	if (!report) {
		void *page = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		report = page == MAP_FAILED ? NULL : page;
	}
	return report;
}

void call_run(struct call *c, struct call_slot *slot, const struct call_meters *m, int control, int zygote,
	      struct call_reply *reply, struct bytes *out, struct bytes *err)
{
	struct running g = {.call = c, .meters = m, .reply = reply, .control = control, .zygote = zygote, .pidfd = -1,
			    .out_fd = -1, .err_fd = -1, .out = out, .err = err};
	struct call_start s = {.call = c, .slot = slot, .report = shared_report()};
	int out_pair[2] = {-1, -1}, err_pair[2] = {-1, -1};
	bool ours = false, started = false;
	uint64_t oom_before = meter_oom_kills(m);
	int error = files_put(slot->work_fd, c);
	if (error)
		not_started(reply, STEP_FILES, error);
	else if (!s.report || !open_stdin(c, &s.in, &ours) || !open_pipe(out_pair) || !open_pipe(err_pair))
		not_started(reply, STEP_FORK, errno);
	else {
		g.out_fd = out_pair[0];
		g.err_fd = err_pair[0];
		s.out = out_pair[1];
		s.err = err_pair[1];
		started = start(&g, &s);
	}
	/* Ours of the ends that the program writes to: else the pipes would have no end. */
	close_fd(&out_pair[1]);
	close_fd(&err_pair[1]);
	if (started) {
		finish(&g, &s);
		drain(&g, &g.out_fd, out, CALL_OUT_OVER);
		drain(&g, &g.err_fd, err, CALL_ERR_OVER);
	} else {
		close_fd(&out_pair[0]);
		close_fd(&err_pair[0]);
	}
	if (ours)
		close(s.in);
	uint64_t after = meter_cpu_us(m);
	reply->cpu_us = after > g.cpu_before_us && g.began_us ? after - g.cpu_before_us : 0;
	reply->oom_kills = meter_oom_kills(m) - oom_before;
}
