/* A worker's life: rights, the socket to PID 1, credit, ends. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "state.h"
#include "work.h"

#define WORK_FD 3
#define ROOT_FD 4

struct buffer work_out;
int work_root, work_fd;
void (*work_abandon)(void);
static int64_t credit;
static uint64_t consumed;
static uint8_t *incoming;

static _Noreturn void give_up(void)
{
	if (work_abandon)
		work_abandon();
	_exit(1);
}

_Noreturn void work_done(void) { _exit(0); }

void work_send(void)
{
	if (work_out.failed || send(work_fd, work_out.data + work_out.start, buffer_size(&work_out), MSG_NOSIGNAL) < 0)
		give_up();
	work_out.start = work_out.end = 0;
}

/* The next message of the host into `incoming`; blocks. */
static struct header receive(void)
{
	struct header h;
	if (!incoming)
		incoming = buffer_reserve(&(struct buffer){0}, HEADER_SIZE + MAX_DATA);
	ssize_t n = incoming ? recv(work_fd, incoming, HEADER_SIZE + MAX_DATA, 0) : 0;
	if (n <= 0 || header_parse(incoming, (size_t)n, &h) != PARSE_OK || (size_t)n != HEADER_SIZE + h.length)
		give_up();
	if (h.type == FR_CREDIT)
		credit += (int64_t)(load_u64(incoming + HEADER_SIZE) & INT32_MAX);
	return h;
}

void work_send_credited(void)
{
	while (credit <= 0)
		receive(); /* DATA of a host that sends some to a verb that wants none falls away */
	credit -= (int64_t)(buffer_size(&work_out) - HEADER_SIZE);
	work_send();
}

void work_data(const uint8_t *bytes, size_t n)
{
	if (n == 0)
		return;
	size_t frame = frame_begin(&work_out, FR_DATA, 0);
	buffer_append(&work_out, bytes, n);
	frame_end(&work_out, frame);
	work_send_credited();
}

static void grant(uint64_t n)
{
	size_t frame = frame_begin(&work_out, FR_CREDIT, 0);
	buffer_append(&work_out, &n, sizeof n);
	frame_end(&work_out, frame);
	work_send();
}

struct span work_receive(void)
{
	if (consumed >= WINDOW / 2) { /* what was handed out before has been dealt with by now */
		grant(consumed);
		consumed = 0;
	}
	for (;;) {
		struct header h = receive();
		if (h.type == FR_DATA && h.length) {
			consumed += h.length;
			return (struct span){incoming + HEADER_SIZE, h.length};
		}
		if (h.type == FR_DATA_END)
			return (struct span){0};
	}
}

void work_wait(int fd)
{
	struct pollfd p[2] = {{.fd = fd, .events = POLLIN}, {.fd = work_fd, .events = POLLIN}};
	for (;;) {
		int n = poll(p, 2, -1);
		if (n > 0 && p[1].revents)
			receive();
		if (n > 0 && p[0].revents)
			return;
	}
}

_Noreturn void work_ok(void)
{
	frame_end(&work_out, frame_begin(&work_out, FR_OK, 0));
	work_send();
	work_done();
}

_Noreturn void work_fail(const char *code, const char *field, int error, const char *message)
{
	if (work_abandon)
		work_abandon();
	work_abandon = NULL;
	work_out.start = work_out.end = 0;
	put_error(&work_out, 0, code, field, error, message);
	work_send();
	_exit(1);
}

_Noreturn void work_fail_errno(const char *field, int error)
{
	work_fail(error_code(error), field, error, strerror(error));
}

#define CAP(name) (1ull << CAP_##name)

static void take_rights(uint8_t type, struct span payload)
{
	struct span user = {0};
	/* Whoever may write files for root inside may write all of them, whatever execs may. */
	uint64_t keep = CAP(CHOWN) | CAP(DAC_OVERRIDE) | CAP(DAC_READ_SEARCH) | CAP(FOWNER) | CAP(FSETID);
	if (type == FR_CLOCK_SET || type == FR_RESEED)
		return;
	if (type == FR_POLICY_PROBE)
		keep = 0;
	field_find(payload, T_USER, &user);
	int result = become_user(user, keep);
	if (result == -ENOENT || result == -EINVAL) /* EINVAL: an id beyond the user namespace */
		work_fail("user_unknown", "user", ENOENT, "no such user or group in the sandbox");
	if (result != 0)
		work_fail_errno("user", -result);
}

_Noreturn void work_main(int fd, uint8_t type, struct span payload)
{
	int root = options.root_fd >= 0 ? options.root_fd : open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	fd = fcntl(fd, F_DUPFD, 10); /* out of the way of each other, then to where they stay */
	root = fcntl(root, F_DUPFD, 10);
	work_fd = dup2(fd, WORK_FD);
	work_root = dup2(root, ROOT_FD);
	syscall(SYS_close_range, 5u, ~0u, 0u);
	if (work_fd < 0 || work_root < 0)
		_exit(1);
	if (type == FR_POLICY_PROBE)
		child_level();
	child_reset();
	signal(SIGPIPE, SIG_IGN);
	credit = (int64_t)(field_int(payload, T_CREDIT, WINDOW) & INT32_MAX);
	take_rights(type, payload);
	switch (type) {
	case FR_READ:
		file_read(payload);
	case FR_WRITE:
		file_write(payload);
	case FR_LIST_DIR:
		file_list(payload);
	case FR_STAT:
		file_stat(payload);
	case FR_MKDIR:
		file_mkdir(payload);
	case FR_MOVE:
		file_move(payload);
	case FR_REMOVE:
		file_remove(payload);
	case FR_CHMOD:
		file_chmod(payload);
	case FR_DOWNLOAD:
		tree_download(payload);
	case FR_UPLOAD:
		tree_upload(payload);
	case FR_WATCH:
		file_watch(payload);
	case FR_CLOCK_SET:
		clock_set(payload);
	case FR_RESEED:
		reseed(payload);
	default:
		policy_probe(payload);
	}
}
