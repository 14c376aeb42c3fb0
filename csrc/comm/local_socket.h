/* Unix sockets between processes of one user on one host: addresses, ends, whole messages, and
 * descriptors. Private to comm/; there only where worlds of processes are.
 *
 * What fails returns false or -1: the caller tries again, or says what it was about. */
#ifndef FS_COMM_LOCAL_SOCKET_H
#define FS_COMM_LOCAL_SOCKET_H

#include "shared.h"

#ifndef FS_THREADS_ONLY

#include <sys/socket.h>
#include <sys/un.h>

typedef struct fs_address {
    struct sockaddr_un name;
    socklen_t nbytes; /* 0: this address cannot be used */
} fs_address;

/* This user's address of a name's hash: no file, but of this network namespace alone. */
fs_address fs_address_abstract(const uint64_t hash[2]);
/* The same as a file in folder, which crosses network namespaces; folder may be NULL. */
fs_address fs_address_in_folder(const char *folder, const uint64_t hash[2]);
/* Is it a folder that only this user can enter? Made if it is not there. */
bool fs_private_folder(const char *path);

/* A connected socket of this process, which the caller closes, or -1: nobody listens there, or a
 * stranger does. Its waits are limited as by fs_socket_limit_silence. */
int fs_socket_connect(const fs_address *where);
/* A listening socket that never waits, or -1 with errno. */
int fs_socket_listen(const fs_address *where);
/* Does the other end belong to this user? */
bool fs_socket_same_user(int fd);
/* The process at the other end; 0: not known. */
int64_t fs_socket_peer(int fd);
/* A peer that says nothing does not hold up the others for longer than a second. */
void fs_socket_limit_silence(int fd);

/* All of nbytes, or false. */
bool fs_socket_send(int fd, const void *data, size_t nbytes);
bool fs_socket_receive(int fd, void *data, size_t nbytes);
/* One byte that carries both descriptors. Received ones are the caller's to close; any other number
 * of them is closed here, and false. */
bool fs_socket_send_files(int fd, const int files[2]);
bool fs_socket_receive_files(int fd, int files[2]);

#endif

#endif
