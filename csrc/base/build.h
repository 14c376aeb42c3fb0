/* Which sources this binary was built from: a hash that setup.py passes. A plugin of another build
 * is refused; two binaries built without setup.py cannot be told apart. */
#ifndef FS_BASE_BUILD_H
#define FS_BASE_BUILD_H

#ifndef FS_BUILD_ID
#define FS_BUILD_ID "unstamped"
#endif

#endif
