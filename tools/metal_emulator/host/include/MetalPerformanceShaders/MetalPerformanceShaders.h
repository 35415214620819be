#pragma once
#import <Metal/Metal.h>
@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
MTL_IVARS(id inner)
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)q;
- (void)commitAndContinue;
@end
typedef enum MPSDataType : uint32_t { MPSDataTypeInvalid = 0 } MPSDataType;
typedef NSArray<NSNumber*> MPSShape;
@class MPSNDArray, MPSImage;
