#include "attack.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int say(const char *key, long long value)
{
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

int main(int argc, char **argv)
{
	const struct verb *tables[] = {call_verbs, flood_verbs, net_verbs};
	for (unsigned i = 0; argc > 1 && i < sizeof(tables) / sizeof(*tables); i++) {
		const struct verb *verb = find(tables[i], argv[1]);
		if (verb)
			return verb->run(argc - 2, argv + 2);
	}
	fprintf(stderr, "attack: no such verb\n");
	return 2;
}
