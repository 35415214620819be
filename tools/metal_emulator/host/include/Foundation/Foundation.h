// Foundation, as far as a hub kernel's host code goes. Same file for the Darwin type check (zig c++) and the Linux run
// (clang).
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __APPLE__
#include <objc/objc.h>
#else
#include <objc/objc.h>
#endif
#include <Block.h>
#include <dispatch/dispatch.h>
#ifdef __APPLE__
#include <objc/NSObjCRuntime.h>
#else
typedef unsigned long NSUInteger;
typedef long NSInteger;
#endif
#ifndef _Nullable
#define MTL_STUB 1
#endif
#ifndef MIN
#define MIN(A, B)            \
  ({                         \
    __typeof__(A) __a = (A); \
    __typeof__(B) __b = (B); \
    __a < __b ? __a : __b;   \
  })
#define MAX(A, B)            \
  ({                         \
    __typeof__(A) __a = (A); \
    __typeof__(B) __b = (B); \
    __a < __b ? __b : __a;   \
  })
#endif
#ifndef YES
#define YES ((BOOL)1)
#define NO ((BOOL)0)
#endif
typedef struct _NSRange {
  NSUInteger location, length;
} NSRange;
static inline NSRange NSMakeRange(NSUInteger l, NSUInteger n) {
  NSRange r = {l, n};
  return r;
}
@class NSString, NSError, NSDictionary, NSArray, NSURL, NSNumber, NSData;
#ifdef __APPLE__
#include <objc/NSObject.h>
#else
@protocol NSObject
- (instancetype)retain;
- (oneway void)release;
- (instancetype)autorelease;
- (NSUInteger)retainCount;
- (Class)class;
- (NSString*)description;
@end
@protocol NSCopying
@end
__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
 @public
  int _references;
}
+ (instancetype)alloc;
+ (instancetype)new;
- (instancetype)init;
- (void)dealloc;
@end
#endif
@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)s;
+ (instancetype)stringWithFormat:(NSString*)f, ...;
- (const char*)UTF8String;
@property(readonly) const char* UTF8String;
@end
#ifndef __APPLE__
@interface NSConstantString : NSString
@end
#endif
@interface NSError : NSObject
@property(readonly, copy) NSString* localizedDescription;
@property(readonly) NSInteger code;
@end
@interface NSArray<T> : NSObject
@property(readonly) NSUInteger count;
@end
@interface NSDictionary<K, V> : NSObject
@end
@interface NSMutableDictionary<K, V> : NSDictionary <K, V>
@end
@interface NSNumber : NSObject
+ (NSNumber*)numberWithInt:(int)v;
@end
@interface NSURL : NSObject
+ (NSURL*)fileURLWithPath:(NSString*)p;
@end
@interface NSData : NSObject
@end
#ifdef __APPLE__
#define MTL_IVARS(...)
#else
#define MTL_IVARS(...) \
  {                    \
   @public             \
    __VA_ARGS__;       \
  }  // GNU runtime: instance variables belong to the interface
#endif
@interface NSAutoreleasePool : NSObject
MTL_IVARS(size_t depth)
- (void)drain;
@end
