/* PID 1 of a test machine: mounts what tests expect, loads modules, runs the command line of /command, powers off. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS 64

/* The file's NUL-ended words. */
static int read_words(const char *path, char **words, char *text, size_t size)
{
	int fd = open(path, O_RDONLY), count = 0;
	ssize_t got = fd < 0 ? 0 : read(fd, text, size - 1);
	for (char *at = text; got > 0 && at < text + got && count < WORDS - 1; at += strlen(at) + 1)
		words[count++] = at;
	words[count] = NULL;
	close(fd);
	return count;
}

/* pivot_root(2) refuses to leave the first root of all, so what is started here stands on a mount above it. */
static void leave_first_root(void)
{
	if (mount("/", "/mnt", NULL, MS_BIND, NULL) || chdir("/mnt") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot("."))
		perror("leaving the first root");
	if (chdir("/"))
		perror("/");
}

int main(void)
{
	static char modules[4096], command[8192];
	char *words[WORDS];
	leave_first_root();
	mount("proc", "/proc", "proc", 0, NULL);
	mount("sysfs", "/sys", "sysfs", 0, NULL);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	mount("tmpfs", "/tmp", "tmpfs", 0, NULL);
	mount("tmpfs", "/run", "tmpfs", 0, NULL);
	if (mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, NULL))
		perror("cgroup2");
	int console = open("/dev/console", O_RDWR);
	for (int fd = 0; console >= 0 && fd < 3; fd++)
		dup2(console, fd);
	int count = read_words("/modules", words, modules, sizeof(modules));
	for (int i = 0; i < count; i++) {
		int fd = open(words[i], O_RDONLY);
		if (syscall(SYS_finit_module, fd, "", 0))
			perror(words[i]);
		close(fd);
	}
	read_words("/command", words, command, sizeof(command));
	pid_t child = fork();
	if (child == 0) {
		setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
		setenv("HOME", "/tmp", 1);
		setenv("PYTHONPATH", "/packages:/tree:/tree/sdk:/tree/policies:/tree/imagefs", 1);
		setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
		if (chdir("/tree") == 0)
			execv(words[0], words);
		perror(words[0]);
		_exit(127);
	}
	int status = 0;
	for (pid_t pid; (pid = wait(&status)) > 0 && pid != child;)
		;
	printf("\nexit status %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128);
	fflush(stdout);
	reboot(RB_POWER_OFF);
}
