/* Pipes and terminals of an exec. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <termios.h>
#include <unistd.h>

#include "state.h"

static int null_fd = -1;

/* Before any program of the sandbox could put something else in its place; O_NONBLOCK in case the image has. */
void ends_init(void)
{
	struct stat st;
	null_fd = open("/dev/null", O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	bool right = null_fd >= 0 && fstat(null_fd, &st) == 0 && S_ISCHR(st.st_mode) && st.st_rdev == makedev(1, 3);
	if (null_fd >= 0 && (!right || fcntl(null_fd, F_SETFL, 0) != 0)) {
		close(null_fd);
		null_fd = -1;
	}
}

static bool pipe_pair(int *ours, int *theirs, bool read_side)
{
	int fd[2];
	if (pipe2(fd, O_CLOEXEC) != 0)
		return false;
	*ours = fd[read_side ? 0 : 1];
	*theirs = fd[read_side ? 1 : 0];
	return fcntl(*ours, F_SETFL, O_NONBLOCK | (read_side ? 0 : O_WRONLY)) == 0;
}

static bool open_pty(struct ends *ends, uint32_t size)
{
	/* O_NONBLOCK and the check of the device number, as whatever lies at that name is up to the sandbox's root. */
	int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), unlock = 0;
	struct stat st;
	if (master < 0)
		return false;
	ends->in = ends->out = master;
	if (fstat(master, &st) != 0 || !S_ISCHR(st.st_mode) || major(st.st_rdev) != 5 || minor(st.st_rdev) != 2 ||
	    ioctl(master, TIOCSPTLCK, &unlock) != 0)
		return false;
	int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (slave < 0)
		return false;
	ends->child_in = ends->child_out = ends->child_err = slave;
	struct winsize w = {.ws_row = (unsigned short)(size >> 16), .ws_col = (unsigned short)size};
	return ioctl(master, TIOCSWINSZ, &w) == 0;
}

bool ends_open(struct ends *ends, struct span payload)
{
	uint64_t size = field_int(payload, T_PTY, 0);
	if (size)
		return open_pty(ends, (uint32_t)size);
	if (field_int(payload, T_STDIN, 0)) {
		if (!pipe_pair(&ends->in, &ends->child_in, false))
			return false;
	} else {
		ends->child_in = null_fd >= 0 ? fcntl(null_fd, F_DUPFD_CLOEXEC, 3) : -1;
		int unused = -1; /* without a /dev/null: a pipe that nobody writes to */
		if (ends->child_in < 0 && !pipe_pair(&unused, &ends->child_in, false))
			return false;
		if (unused >= 0)
			close(unused);
	}
	return pipe_pair(&ends->out, &ends->child_out, true) && pipe_pair(&ends->err, &ends->child_err, true);
}

void close_all(int a, int b, int c)
{
	if (a >= 0)
		close(a);
	if (b >= 0 && b != a)
		close(b);
	if (c >= 0 && c != a && c != b)
		close(c);
}

