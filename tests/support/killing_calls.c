/* A library that is loaded before all others: it counts the calls of a process that change files in a folder, whoever
   makes them, and kills the process before one of them. Python's own functions are not all: torch writes in C++. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long left;

/* From now on calls on files in `where` count; the process dies before the call `count`, from 0 on. */
void arm(const char *where, long count) {
  left = count;
  strncpy(folder, where, sizeof folder - 1);
}

static void before(int is_inside) {
  if (is_inside && __sync_fetch_and_sub(&left, 1) == 0) kill(getpid(), SIGKILL);
}

static int is_inside(const char *path) {
  return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_open_inside(int fd) {
  char link[64], path[PATH_MAX];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return is_inside(path);
}

#define NEXT(name, ...) (((__typeof__(name) *)dlsym(RTLD_NEXT, #name))(__VA_ARGS__))
#define OF_DESCRIPTOR(type, name, declared, ...) \
  type name declared { before(is_open_inside(fd)); return NEXT(name, __VA_ARGS__); }
#define OF_PATH(type, name, declared, ...) \
  type name declared { before(is_inside(path)); return NEXT(name, __VA_ARGS__); }
#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    before(is_inside(path) && (flags & (O_CREAT | O_TRUNC))); \
    return NEXT(name, path, flags, mode); \
  }

OF_DESCRIPTOR(ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
OF_DESCRIPTOR(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
OF_DESCRIPTOR(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
OF_DESCRIPTOR(ssize_t, writev, (int fd, const struct iovec *data, int count), fd, data, count)
OF_DESCRIPTOR(int, ftruncate, (int fd, off_t size), fd, size)
OF_DESCRIPTOR(int, ftruncate64, (int fd, off64_t size), fd, size)
OF_DESCRIPTOR(int, fsync, (int fd), fd)
OF_DESCRIPTOR(int, fdatasync, (int fd), fd)
OF_PATH(int, rename, (const char *path, const char *target), path, target)
OF_PATH(int, renameat, (int from, const char *path, int to, const char *target), from, path, to, target)
OF_PATH(int, unlink, (const char *path), path)
OF_PATH(int, unlinkat, (int from, const char *path, int flags), from, path, flags)
OF_PATH(int, mkdir, (const char *path, mode_t mode), path, mode)
OF_PATH(int, rmdir, (const char *path), path)
OPENS(open)
OPENS(open64)
