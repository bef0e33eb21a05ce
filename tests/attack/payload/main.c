#include "attack.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int attempt = -1; /* which of `many` this process carries out */

int say(const char *key, long long value)
{
	if (attempt >= 0)
		printf("%d.", attempt);
	printf("%s %lld\n", key, value);
	fflush(stdout);
	return 0;
}

int say_errno(const char *key, long long result)
{
	return say(key, result == -1 ? errno : 0);
}

long long number(const char *text)
{
	return (long long)strtoull(text, NULL, 0);
}

static const struct verb *find(const struct verb *table, const char *name)
{
	for (; table->name; table++)
		if (!strcmp(table->name, name))
			return table;
	return NULL;
}

static int run(int argc, char **argv)
{
	const struct verb *tables[] = {call_verbs, flood_verbs, net_verbs};
	for (unsigned i = 0; argc > 0 && i < sizeof(tables) / sizeof(*tables); i++) {
		const struct verb *verb = find(tables[i], argv[0]);
		if (verb)
			return verb->run(argc - 1, argv + 1);
	}
	fprintf(stderr, "attack: no such verb\n");
	return 2;
}

/* many VERB ARG... -- VERB ARG... : each in a child of its own, keys prefixed by its number; "<n>.signal" when killed. */
static int many(int argc, char **argv)
{
	int number = 0;
	for (int from = 0; from < argc; number++) {
		int to = from, status;
		while (to < argc && strcmp(argv[to], "--"))
			to++;
		pid_t pid = fork();
		if (pid == 0) {
			attempt = number;
			argv[to] = NULL;
			exit(run(to - from, argv + from));
		}
		attempt = number;
		if (pid < 0 || waitpid(pid, &status, 0) < 0)
			return 1;
		if (WIFSIGNALED(status))
			say("signal", WTERMSIG(status));
		attempt = -1;
		from = to + 1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "many"))
		return many(argc - 2, argv + 2);
	return run(argc - 1, argv + 1);
}
