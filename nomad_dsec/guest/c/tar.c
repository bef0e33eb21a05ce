/* Tar headers to and from structs. No I/O but through a callback; fuzzed. */
#include "tar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool number(const char *field, size_t n, uint64_t *out)
{
	const uint8_t *at = (const uint8_t *)field;
	*out = 0;
	if (at[0] & 0x80) { /* base 256, GNU; negative ones are of no use here */
		if (at[0] & 0x40)
			return false;
		for (size_t i = 0; i < n; i++) {
			if (*out >> 55)
				return false;
			*out = *out << 8 | (i == 0 ? at[i] & 0x7f : at[i]);
		}
		return true;
	}
	size_t i = 0;
	while (i < n && at[i] == ' ')
		i++;
	for (; i < n && at[i] && at[i] != ' '; i++) {
		if (at[i] < '0' || at[i] > '7' || *out >> 60)
			return false;
		*out = *out << 3 | (unsigned)(at[i] - '0');
	}
	return true;
}

static unsigned checksum(const struct block *b)
{
	const uint8_t *at = (const uint8_t *)b;
	unsigned sum = 0;
	for (size_t i = 0; i < BLOCK; i++)
		sum += i >= offsetof(struct block, checksum) && i < offsetof(struct block, checksum) + 8 ? ' ' : at[i];
	return sum;
}

static bool decimal(const char *text, uint64_t *out)
{
	*out = 0;
	if (!*text)
		return false;
	for (; *text; text++) {
		if (*text < '0' || *text > '9' || *out > (UINT64_MAX >> 1) / 10 - 1)
			return false;
		*out = *out * 10 + (unsigned)(*text - '0');
	}
	return true;
}

static bool copy_text(char to[NAME_ROOM], const char *from, size_t n)
{
	if (n >= NAME_ROOM || memchr(from, 0, n))
		return false;
	memcpy(to, from, n);
	to[n] = 0;
	return true;
}

static bool pax_mtime(char *value, int64_t *out)
{
	bool negative = *value == '-';
	char *dot = strchr(value, '.');
	uint64_t seconds;
	if (dot)
		*dot = 0;
	if (!decimal(value + negative, &seconds))
		return false;
	*out = negative ? -(int64_t)seconds : (int64_t)seconds;
	return true;
}

/* What extension headers said; they hold for the next member and win over its block. */
struct extra {
	bool name, link, size, uid, gid, mtime, sparse_other;
	struct member m;
};

static bool pax_record(struct extra *x, const char *key, char *value, size_t n)
{
	uint64_t version;
	if (strcmp(key, "path") == 0 || strcmp(key, "GNU.sparse.name") == 0)
		return x->name = copy_text(x->m.name, value, n);
	if (strcmp(key, "linkpath") == 0)
		return x->link = copy_text(x->m.link, value, n);
	if (strcmp(key, "size") == 0)
		return x->size = decimal(value, &x->m.size);
	if (strcmp(key, "uid") == 0)
		return x->uid = decimal(value, &x->m.uid);
	if (strcmp(key, "gid") == 0)
		return x->gid = decimal(value, &x->m.gid);
	if (strcmp(key, "mtime") == 0)
		return x->mtime = pax_mtime(value, &x->m.mtime);
	if (strcmp(key, "GNU.sparse.realsize") == 0)
		return decimal(value, &x->m.real_size);
	if (strcmp(key, "GNU.sparse.major") == 0) {
		x->m.sparse = decimal(value, &version) && version == 1;
		return x->m.sparse;
	}
	if (strncmp(key, "GNU.sparse.", 11) == 0 && strcmp(key, "GNU.sparse.minor") != 0)
		x->sparse_other = true; /* versions 0.0 and 0.1 */
	return true;
}

static bool pax_parse(struct extra *x, char *text, size_t n)
{
	for (size_t at = 0; at < n;) {
		uint64_t size = 0;
		size_t digits = at;
		while (digits < n && text[digits] >= '0' && text[digits] <= '9' && size <= n)
			size = size * 10 + (unsigned)(text[digits++] - '0');
		if (digits == at || digits >= n || text[digits] != ' ' || size > n - at || size < digits - at + 3 ||
		    text[at + size - 1] != '\n')
			return false;
		char *key = text + digits + 1, *end = text + at + size - 1;
		char *equals = memchr(key, '=', (size_t)(end - key));
		if (!equals)
			return false;
		*equals = 0;
		*end = 0;
		if (!pax_record(x, key, equals + 1, (size_t)(end - equals - 1)))
			return false;
		at += size;
	}
	return true;
}

static bool read_extension(tar_read *read, void *context, struct extra *x, char type, uint64_t size)
{
	if (size > PAX_MAX)
		return false;
	size_t padded = (size_t)((size + BLOCK - 1) / BLOCK * BLOCK);
	char *text = malloc(padded + 1);
	bool good = text && read(context, (uint8_t *)text, padded);
	if (good) {
		text[size] = 0;
		if (type == 'x')
			good = pax_parse(x, text, (size_t)size);
		else if (type == 'L')
			good = x->name = copy_text(x->m.name, text, strlen(text));
		else if (type == 'K')
			good = x->link = copy_text(x->m.link, text, strlen(text));
	}
	free(text);
	return good;
}

static void text_of(char to[NAME_ROOM], const char *field, size_t n)
{
	size_t length = strnlen(field, n);
	memcpy(to, field, length);
	to[length] = 0;
}

static bool member_of(const struct block *b, const struct extra *x, struct member *m)
{
	uint64_t mtime;
	if (!number(b->size, 12, &m->size) || !number(b->mode, 8, &m->mode) || !number(b->uid, 8, &m->uid) ||
	    !number(b->gid, 8, &m->gid) || !number(b->mtime, 12, &mtime))
		return false;
	m->mtime = (int64_t)mtime;
	m->type = b->type ? b->type : '0';
	m->mode &= 07777;
	size_t prefix = memcmp(b->magic, "ustar", 6) == 0 ? strnlen(b->prefix, 155) : 0;
	if (prefix) {
		memcpy(m->name, b->prefix, prefix);
		m->name[prefix++] = '/';
	}
	text_of(m->name + prefix, b->name, 100);
	text_of(m->link, b->link, 100);
	if (x->name)
		strcpy(m->name, x->m.name);
	if (x->link)
		strcpy(m->link, x->m.link);
	if (x->size)
		m->size = x->m.size;
	if (x->uid)
		m->uid = x->m.uid;
	if (x->gid)
		m->gid = x->m.gid;
	if (x->mtime)
		m->mtime = x->m.mtime;
	m->sparse = x->m.sparse;
	m->real_size = x->m.sparse ? x->m.real_size : m->size;
	size_t n = strlen(m->name);
	if (m->type == '0' && n && m->name[n - 1] == '/') /* before POSIX a directory was told by that only */
		m->type = '5';
	if (m->type == '1' || m->type == '2' || m->type == '5' || m->type == '3' || m->type == '4' || m->type == '6')
		m->size = 0;
	return m->size < (uint64_t)1 << 62;
}

enum tar_result tar_next(tar_read *read, void *context, struct member *member, const char **why)
{
	static struct extra x; /* large, and one archive is read at a time */
	struct block b;
	memset(&x, 0, offsetof(struct extra, m) + offsetof(struct member, name));
	x.m.sparse = false;
	x.m.real_size = 0;
	for (int extensions = 0; extensions < 16; extensions++) {
		static const struct block zero;
		uint64_t sum, size;
		if (!read(context, (uint8_t *)&b, BLOCK)) {
			*why = "it ends without its end mark: cut short?";
			return TAR_BAD;
		}
		if (memcmp(&b, &zero, BLOCK) == 0)
			return TAR_END;
		if (!number(b.checksum, 8, &sum) || sum != checksum(&b) || !number(b.size, 12, &size)) {
			*why = "a header has a wrong checksum or size";
			return TAR_BAD;
		}
		if (b.type == 'x' || b.type == 'g' || b.type == 'L' || b.type == 'K') {
			if (read_extension(read, context, &x, b.type, size))
				continue;
			*why = "an extended header is malformed, too large or of no version we know";
			return TAR_BAD;
		}
		if (!member_of(&b, &x, member) || b.type == 'S' || x.sparse_other) {
			*why = "a header is malformed, or of an old sparse format";
			return TAR_BAD;
		}
		return TAR_MEMBER;
	}
	*why = "extended headers follow each other without end";
	return TAR_BAD;
}

static size_t pax_put(char *to, const char *key, const char *value)
{
	size_t body = strlen(key) + strlen(value) + 3, size = body + 1; /* space, '=', newline; and the digits of size */
	char digits[24];
	for (;;) {
		size_t n = (size_t)snprintf(digits, sizeof digits, "%zu", size);
		if (body + n == size)
			break;
		size = body + n;
	}
	return (size_t)sprintf(to, "%s %s=%s\n", digits, key, value);
}

static void octal(char *to, size_t n, uint64_t value)
{
	snprintf(to, n, "%0*llo", (int)n - 1, (unsigned long long)value);
}

static void block_put(uint8_t *to, const struct member *m, const char *name, char type, uint64_t size)
{
	struct block b;
	memset(&b, 0, sizeof b);
	memcpy(b.name, name, strnlen(name, 100));
	octal(b.mode, 8, m->mode & 07777);
	octal(b.uid, 8, m->uid <= 07777777 ? m->uid : 0);
	octal(b.gid, 8, m->gid <= 07777777 ? m->gid : 0);
	octal(b.size, 12, size <= 077777777777 ? size : 0);
	octal(b.mtime, 12, m->mtime >= 0 && m->mtime <= 077777777777 ? (uint64_t)m->mtime : 0);
	b.type = type;
	if (type == '1' || type == '2')
		memcpy(b.link, m->link, strnlen(m->link, 100));
	memcpy(b.magic, "ustar", 6);
	memcpy(b.version, "00", 2);
	char sum[8];
	snprintf(sum, sizeof sum, "%06o", checksum(&b) & 0777777u);
	memcpy(b.checksum, sum, 7);
	b.checksum[7] = ' ';
	memcpy(to, &b, BLOCK);
}

static size_t pax_int(char *to, const char *key, int64_t value)
{
	char text[24];
	snprintf(text, sizeof text, "%lld", (long long)value);
	return pax_put(to, key, text);
}

size_t tar_header(uint8_t *to, const struct member *m)
{
	char *pax = (char *)to + BLOCK;
	size_t n = 0, at = 0;
	if (m->sparse) {
		n += pax_put(pax + n, "GNU.sparse.major", "1");
		n += pax_put(pax + n, "GNU.sparse.minor", "0");
		n += pax_put(pax + n, "GNU.sparse.name", m->name);
		n += pax_int(pax + n, "GNU.sparse.realsize", (int64_t)m->real_size);
	} else if (strlen(m->name) > 100) {
		n += pax_put(pax + n, "path", m->name);
	}
	if (strlen(m->link) > 100)
		n += pax_put(pax + n, "linkpath", m->link);
	if (m->size > 077777777777)
		n += pax_int(pax + n, "size", (int64_t)m->size);
	if (m->uid > 07777777)
		n += pax_int(pax + n, "uid", (int64_t)m->uid);
	if (m->gid > 07777777)
		n += pax_int(pax + n, "gid", (int64_t)m->gid);
	if (m->mtime < 0 || m->mtime > 077777777777)
		n += pax_int(pax + n, "mtime", m->mtime);
	if (n) {
		size_t padded = (n + BLOCK - 1) / BLOCK * BLOCK;
		memset(pax + n, 0, padded - n);
		block_put(to, m, "@PaxHeader", 'x', n);
		at = BLOCK + padded;
	}
	block_put(to + at, m, m->name, m->type, m->size);
	return at + BLOCK;
}
