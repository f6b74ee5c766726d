"""A UNet of diffusers, trained as in its guide and then sampled: ``diffusion.py cpu|npu``."""

import sys

import torch
from _model import STEPS, say
from accelerate import Accelerator
from diffusers import DDIMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn.functional import mse_loss

device = sys.argv[1]
accelerator = Accelerator(cpu=device == "cpu")
assert accelerator.device.type == device, accelerator.device
torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
random = torch.Generator().manual_seed(0)
images = torch.rand(STEPS, 4, 3, 16, 16, generator=random) * 2 - 1
noises = torch.randn(images.shape, generator=random)
times = torch.randint(0, 1000, (STEPS, 4), generator=random)
scheduler = DDPMScheduler(num_train_timesteps=1000)
average = EMAModel(unet.parameters(), decay=0.9)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
warmup = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=STEPS)
unet, optimizer, warmup = accelerator.prepare(unet, optimizer, warmup)
average.to(accelerator.device)
losses = []
for image, noise, time in zip(*(data.to(accelerator.device) for data in (images, noises, times)), strict=True):
    with accelerator.accumulate(unet):
        loss = mse_loss(unet(scheduler.add_noise(image, noise, time), time, return_dict=False)[0], noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        average.step(unet.parameters())
    losses.append(loss.item())
average.copy_to(unet.parameters())
pipeline = DDIMPipeline(accelerator.unwrap_model(unet), scheduler)
pipeline.set_progress_bar_config(disable=True)
drawn = pipeline(batch_size=2, generator=torch.Generator().manual_seed(1), num_inference_steps=4, output_type="np")
say([*losses, drawn.images.mean(), drawn.images.std()])
